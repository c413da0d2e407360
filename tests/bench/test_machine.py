from torchmpi_py.bench import machine


def test_the_last_cache_is_the_one_of_the_highest_level(tmp_path):
    for index, (level, size) in enumerate([("1", "48K"), ("3", "30720K"), ("2", "2M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert machine.last_level_cache_bytes(tmp_path) == 30 << 20
    assert machine.last_level_cache_bytes(tmp_path / "none") is None


def test_free_memory_is_what_machine_and_container_leave(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.free_bytes(meminfo, tmp_path) == 4000
    assert machine.free_bytes(tmp_path / "none", tmp_path / "none") > 0
