"""Defaults of torchmpirun's options in files, and the network interface that is named once."""

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as launcher, command, job_spec, mpirun, site_settings

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Write a file of settings; the user's is ``user.toml``."""

    def write(text, name="site.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    monkeypatch.setattr(site_settings, "USER", str(tmp_path / "user.toml"))
    monkeypatch.setenv("TORCHMPI_CONFIG", str(write("")))
    return write


SITE = 'mpi = "mpich"\nbind = "numa"\nenv = ["A=1"]\nsrun_mpi = "pmi2"\ninterface = "ib0"\nmpi_args = ["-x", "a b"]\n'
USER = 'bind = "socket"\nlaunch_agent = "/bin/agent"\ninterface = ""\nenv = "C=-x y"\ngrace = 0\n'


def test_the_command_line_wins_over_the_user_over_the_site(settings, capsys):
    site, user = settings(SITE), settings(USER, "user.toml")
    options = launcher.parse(["--srun-mpi", "pmix", "--env", "B=2", "--elastic", "a.py"])
    assert (options.mpi, options.bind, options.srun_mpi, options.elastic) == ("mpich", "socket", "pmix", True)
    assert (options.env, options.mpi_args) == (["A=1", "C=-x y", "B=2"], ["-x", "a b"])
    assert (options.interface, options.grace) == ("", 0)
    assert launcher.main(["--dry-run", "--bind", "none", "a.py"]) == 0
    files = {"mpi": site, "env": user, "srun_mpi": site, "interface": user, "mpi_args": site}
    files |= {"launch_agent": user, "grace": user}  # and not --bind, which is the command line's
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert shown == [f"# {name}: from {file}" for name, file in files.items()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('mpi = "ompi"', "invalid choice: 'ompi'"),
        ('colour = "red"', "colour is not a setting (mpi, interface, "),
        ("timeout = -1", "-1 seconds are not a valid limit"),
        ("timeout = true", "timeout = True: expected a string or a number; correct this file (to replace the site's"),
        ("env = [1]", "env = [1]: expected a string or a number or a list of strings"),
        ("mpi = {}", "mpi = {}: expected"),
        ("bind = ['core']", "bind = ['core']: expected a string or a number;"),
        ("mpi = mpich", "cannot be read as TOML"),
    ],
)
def test_a_mistake_is_named_with_its_file(settings, capfd, text, said):
    file = settings(text)
    try:
        code = launcher.main(["--dry-run", "a.py"])
    except SystemExit as error:
        code = error.code
    shown = capfd.readouterr().err
    assert code == 2
    assert f"{file}: " in shown
    assert said in shown


def test_a_file_that_is_named_and_missing_is_an_error_and_none_is_needed(settings, monkeypatch, tmp_path):
    for name in ("/none", "none", "pyproject.toml"):  # which is there, and not for a rank in another folder
        with pytest.raises(LaunchError, match=f"TORCHMPI_CONFIG={name}: expected the full path of a file"):
            site_settings.files({"TORCHMPI_CONFIG": name})
    monkeypatch.setattr(site_settings, "SITE", str(tmp_path / "none"))
    for none in ({}, {"TORCHMPI_CONFIG": ""}, {"TORCHMPI_CONFIG": "/dev/null"}):
        assert site_settings.files(none) == []
    settings("", "user.toml")
    assert site_settings.files({}) == [tmp_path / "user.toml"]


def test_an_interface_is_set_for_all_that_use_the_network(monkeypatch, tmp_path):
    def build(vendor, *words):
        words = ["--dry-run", "--mpi", vendor, "--interface", "ib0", *words, "-n", "2", "a.py"]
        return command.build(job_spec.read(launcher.parse(words), words, {}), tmp_path)

    assert "ib0" not in build("openmpi").added.values()
    for vendor in mpirun.NAMES:
        made = build(vendor, "--hosts", "a,b")
        names = {"GLOO_SOCKET_IFNAME", *mpirun.vendor_named(vendor).interface_variables}
        assert {made.added[name] for name in names} == {"ib0"}
        assert (made.added["NCCL_SOCKET_IFNAME"], made.added["UCX_NET_DEVICES"]) == ("=ib0", "ib0")
        assert ("-iface" in made.words) == (vendor in ("mpich", "intel"))
        assert names | {"UCX_NET_DEVICES"} <= {*made.forwarded, *made.environment}
    monkeypatch.setattr(command, "NETWORKS", tmp_path)
    (tmp_path / "ib0" / "device" / "infiniband" / "mlx5_1").mkdir(parents=True)
    assert build("openmpi", "--hosts", "a,b").added["UCX_NET_DEVICES"] == "ib0"
    (tmp_path / "ib0" / "dev_port").write_text("0\n")
    assert build("openmpi", "--hosts", "a,b").added["UCX_NET_DEVICES"] == "mlx5_1:1"
