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


def test_the_command_line_wins_over_the_user_over_the_site(settings, capsys):
    site = settings('mpi = "mpich"\nbind = "numa"\nenv = ["A=1"]\nsrun_mpi = "pmi2"\nelastic = false\n')
    user = settings('bind = "socket"\nlaunch_agent = "/bin/agent"\n', "user.toml")
    options = launcher.parse(["--srun-mpi", "pmix", "--env", "B=2", "--elastic", "a.py"])
    assert (options.mpi, options.bind, options.srun_mpi, options.elastic) == ("mpich", "socket", "pmix", True)
    assert options.env == ["A=1", "B=2"]
    assert launcher.main(["--dry-run", "--bind", "none", "a.py"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == [
        f"# mpi: from {site}",
        f"# env: from {site}",
        f"# srun_mpi: from {site}",
        f"# launch_agent: from {user}",
    ]
    assert "bind" not in shown[4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('mpi = "ompi"', "invalid choice: 'ompi'"),
        ('colour = "red"', "unrecognized arguments: --colour=red"),
        ("max_restarts = -1", "-1 restarts are not possible"),
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
    with pytest.raises(LaunchError, match="TORCHMPI_CONFIG=/none: there is no such file"):
        site_settings.files({"TORCHMPI_CONFIG": "/none"})
    monkeypatch.setattr(site_settings, "SITE", str(tmp_path / "none"))
    assert site_settings.files({}) == []
    settings("", "user.toml")
    assert site_settings.files({}) == [tmp_path / "user.toml"]


def test_an_interface_is_set_for_all_that_use_the_network(monkeypatch, tmp_path):
    def build(vendor, *words):
        words = ["--dry-run", "--mpi", vendor, "--interface", "ib0", *words, "-n", "2", "a.py"]
        return command.build(job_spec.read(launcher.parse(words), words, {}), tmp_path)

    with pytest.raises(LaunchError, match=r"--interface ib0: this host has .*lo.*; name one of them"):
        build("openmpi")
    for vendor in mpirun.NAMES:
        made = build(vendor, "--hosts", "a,b")
        names = {"GLOO_SOCKET_IFNAME", *mpirun.vendor_named(vendor).interface_variables}
        assert {made.added[name] for name in names} == {"ib0"}
        assert (made.added["NCCL_SOCKET_IFNAME"], made.added["UCX_NET_DEVICES"]) == ("=ib0", "ib0")
        assert ("-iface" in made.words) == (vendor in ("mpich", "intel"))
        assert names | {"UCX_NET_DEVICES"} <= {*made.forwarded, *made.environment}
    monkeypatch.setattr(command, "_NETWORKS", tmp_path)
    (tmp_path / "ib0" / "device" / "infiniband" / "mlx5_1").mkdir(parents=True)
    (tmp_path / "ib0" / "dev_port").write_text("0\n")
    assert build("openmpi", "--hosts", "a,b").added["UCX_NET_DEVICES"] == "mlx5_1:1"
