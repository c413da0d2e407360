from torchmpi_py.memory import caches


def test_the_last_cache_is_the_one_of_the_highest_level(tmp_path):
    for index, (level, size) in enumerate([("1", "48K"), ("3", "30720K"), ("2", "2048K"), ("4", "much")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert caches.last_level_cache_bytes(tmp_path) == 30 << 20
    assert caches.last_level_cache_bytes(tmp_path / "none") is None
