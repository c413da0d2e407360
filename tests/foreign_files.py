"""What another user may put at a path that the package opens: one function for each kind."""

import os
import pickle
import socket

STRANGER = 54321  # a user id that nobody here has


class RunsCode:
    """A pickle of this creates the file ``mark`` when it is read."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def link(path):
    target = path.with_name("elsewhere")
    target.write_text("untouched")
    path.symlink_to(target)
    if os.geteuid() == 0:
        os.lchown(path, STRANGER, STRANGER)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def directory(path):
    path.mkdir()


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def of_another(path):
    path.write_text("{}")
    os.chown(path, STRANGER, STRANGER)


def huge(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse


def garbage(path):
    path.write_bytes(b"\xff\x00{[" * 50)


def deep(path):
    path.write_text("[" * 100_000)


def code(path):
    path.write_bytes(pickle.dumps(RunsCode(path.with_name("ran"))))


NOT_OURS = (link, of_another)
NOT_FILES = (pipe, device, directory, bound_socket)
BAD_CONTENT = (huge, garbage, deep, code)
ALL = (*NOT_OURS, *NOT_FILES, *BAD_CONTENT)
