"""Entries in a directory: their format, who may have written them, kills in the middle of a write, size, locks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from emutpu.backend import cache_upkeep
from emutpu.backend.cache_entry import RejectedEntry, pack, read_header, unpack
from emutpu.backend.cache_store import DirectoryStore, UnsafeFolder, open_folder

ROOT = Path(__file__).resolve().parents[3]
BINARY = "0123456789abcdef"
STEM = "_".join(("00112233445566ff",) * 3)
SECRET = b"a secret of the tests"


def stem(number: int) -> str:
    """One of many keys."""
    return "_".join([f"{number:016x}"] * 3)


def store(root: Path, **options: object) -> DirectoryStore:
    """The store of one environment in ``root``."""
    given: dict = {"shared_parts": 0, "cap": 1 << 30} | options
    return DirectoryStore(root, (BINARY,), **given)


def resealed(data: bytes, header: object) -> bytes:
    """The entry with another header and a checksum that holds: what a forger would write."""
    fixed = struct.Struct("<8sIIQ")
    magic, version, size, payload_size = fixed.unpack_from(data)
    start = fixed.size + 64
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    front = fixed.pack(magic, version, len(text), payload_size)
    rest = text + data[start + size :]
    return front + hashlib.sha256(front + rest).digest() + bytes(32) + rest


# ------------------------------------------------------------------------------------------------ format


def test_round_trip() -> None:
    """What was packed comes back, with what is known of it."""
    entry = unpack(pack(STEM, BINARY, b"code", 1.5), STEM, BINARY)
    assert (entry.payload, entry.seconds, entry.signed) == (b"code", 1.5, False)
    assert abs(entry.made - time.time()) < 60
    assert unpack(pack(STEM, BINARY, b"", 0.0, SECRET), STEM, BINARY, SECRET).signed


def test_every_byte_counts() -> None:
    """An entry with any byte changed, cut anywhere, or longer than it says is rejected."""
    data = pack(STEM, BINARY, bytes(range(64)), 0.25)
    for position in range(len(data)):
        if 56 <= position < 88:  # the signature, which nobody asked for
            continue
        with pytest.raises(RejectedEntry):
            unpack(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :], STEM, BINARY)
    for length in range(len(data)):
        with pytest.raises(RejectedEntry):
            unpack(data[:length], STEM, BINARY)
    with pytest.raises(RejectedEntry):
        unpack(data + b"\0", STEM, BINARY)


def test_signatures() -> None:
    """With a secret an entry that is unsigned, signed with another, or changed is rejected."""
    signed = pack(STEM, BINARY, b"code", 1.0, SECRET)
    for position in range(len(signed)):
        with pytest.raises(RejectedEntry):
            unpack(signed[:position] + bytes([signed[position] ^ 1]) + signed[position + 1 :], STEM, BINARY, SECRET)
    for bad in (pack(STEM, BINARY, b"code", 1.0), pack(STEM, BINARY, b"code", 1.0, b"another secret!!")):
        with pytest.raises(RejectedEntry, match=r"unsigned|not of this secret"):
            unpack(bad, STEM, BINARY, SECRET)
    header = {"key": STEM, "binary": BINARY, "seconds": 1.0, "made": 1.0}
    with pytest.raises(RejectedEntry, match="unsigned"):
        unpack(resealed(signed, header), STEM, BINARY, SECRET)


def test_entries_of_others() -> None:
    """An entry under another key's or environment's name is rejected."""
    data = pack(STEM, BINARY, b"code", 1.0)
    with pytest.raises(RejectedEntry, match="another key"):
        unpack(data, stem(1), BINARY)
    with pytest.raises(RejectedEntry, match="another environment"):
        unpack(data, STEM, "f" * 16)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff\xfe",
        b"[" * 50_000,
        b"1" * 5_000,
        b'{"key": NaN}',
        [],
        None,
        7,
        "text",
        {},
        {"key": STEM, "binary": BINARY, "seconds": "1", "made": 1.0},
        {"key": STEM, "binary": BINARY, "seconds": True, "made": 1.0},
        {"key": STEM, "binary": BINARY, "seconds": -1.0, "made": 1.0},
        {"key": STEM, "binary": BINARY, "seconds": float("nan"), "made": 1.0},
        {"key": STEM, "binary": BINARY, "seconds": 10**400, "made": 1.0},
        {"key": [STEM], "binary": BINARY, "seconds": 1.0, "made": 1.0},
        {"key": STEM, "binary": None, "seconds": 1.0, "made": 1.0},
    ],
)
def test_forged_headers(header: object) -> None:
    """A header that holds anything at all under a right checksum is rejected as such."""
    with pytest.raises(RejectedEntry):
        read_header(resealed(pack(STEM, BINARY, b"code", 1.0), header))


# ------------------------------------------------------------------------------------------------ directories


def test_modes(tmp_path: Path) -> None:
    """Directories are made for their owner alone, and so are files, whatever the umask says."""
    before = os.umask(0)
    try:
        made = store(tmp_path / "new" / "root")
        made.write(STEM, b"data")
        with made.lock(STEM):
            pass
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "root"
    assert {path: path.stat().st_mode & 0o777 for path in (folder, folder / BINARY)} == {
        folder: 0o700,
        folder / BINARY: 0o700,
    }
    assert {path.stat().st_mode & 0o777 for path in (folder / BINARY).iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_a_root_that_others_may_write(tmp_path: Path, mode: int) -> None:
    """Such a root is refused, with the command that repairs it."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(UnsafeFolder, match=f"chmod 700 {root}"):
        store(root)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o777])
def test_a_folder_of_entries_that_others_may_open(tmp_path: Path, mode: int) -> None:
    """What we make ourselves must still be as we made it."""
    store(tmp_path)
    (tmp_path / BINARY).chmod(mode)
    with pytest.raises(UnsafeFolder, match="chmod 700"):
        store(tmp_path)


def test_directories_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner must be this user."""
    store(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeFolder, match="belongs to user"):
        store(tmp_path)


def test_symbolic_links(tmp_path: Path) -> None:
    """Neither the root, nor a directory in it, nor an entry may be a link."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        store(tmp_path / "link")
    (tmp_path / "root").mkdir(mode=0o700)
    (tmp_path / "root" / BINARY).symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        store(tmp_path / "root")
    good = store(tmp_path / "other")
    (tmp_path / "target").write_bytes(pack(STEM, BINARY, b"code", 1.0))
    (good.path / f"{STEM}.bin").symlink_to(tmp_path / "target")
    with pytest.raises(RejectedEntry, match="symbolic link"):
        good.read(STEM)
    good.quarantine(STEM)
    assert good.read(STEM) is None
    assert (tmp_path / "target").exists()


def test_files_that_are_no_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe does not hang the reader; what others may write or own is rejected."""
    made = store(tmp_path)
    os.mkfifo(made.path / f"{stem(1)}.bin")
    (made.path / f"{stem(2)}.bin").mkdir()
    made.write(stem(3), b"data")
    (made.path / f"{stem(3)}.bin").chmod(0o666)
    for number in (1, 2, 3):
        with pytest.raises((RejectedEntry, OSError)):
            made.read(stem(number))
    made.write(stem(4), b"data")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RejectedEntry, match="belongs to user"):
        made.read(stem(4))


def test_read_only(tmp_path: Path) -> None:
    """A read-only store leaves every byte, name and time as it was, and does not make its directory."""
    writer = store(tmp_path)
    writer.write(STEM, b"data")
    path = writer.path / f"{STEM}.bin"
    os.utime(path, (1, 1))
    reader = store(tmp_path, read_only=True)
    assert reader.read(STEM) == b"data"
    reader.write(stem(1), b"data")
    reader.quarantine(STEM)
    with reader.lock(stem(2)) as held:
        assert not held
    assert path.stat().st_mtime == 1
    assert [item.name for item in writer.path.iterdir()] == [path.name]
    with pytest.raises(FileNotFoundError):
        store(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    """Somebody empties the cache beneath us: reads miss, writes and locks make it anew."""
    made = store(tmp_path / "root")
    made.write(STEM, b"data")
    for path in made.path.iterdir():
        path.unlink()
    made.path.rmdir()
    made.root.rmdir()
    assert made.read(STEM) is None
    with made.lock(STEM) as held:
        assert held
    made.write(STEM, b"again")
    assert made.read(STEM) == b"again"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves nothing behind, and the old entry as it was."""
    made = store(tmp_path)
    made.write(STEM, b"old")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        made.write(STEM, b"new")
    monkeypatch.undo()
    assert made.read(STEM) == b"old"
    assert [path.name for path in made.path.iterdir()] == [f"{STEM}.bin"]


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    """Bad entries are kept for a look, the newest sixteen of them, and never read."""
    made = store(tmp_path)
    for number in range(40):
        made.write(stem(number), b"bad")
        made.quarantine(stem(number))
        assert made.read(stem(number)) is None
    kept = sorted(path.name.split("_")[0] for path in (made.path / "quarantine").iterdir())
    assert kept == [f"{number:016x}" for number in range(24, 40)]


# ------------------------------------------------------------------------------------------------ size


def test_size_cap(tmp_path: Path) -> None:
    """Beyond the cap the entries that nobody read for the longest go, in every environment below the root."""
    old = DirectoryStore(tmp_path, ("f" * 16,), shared_parts=0, cap=1 << 30)
    for number in range(5):
        old.write(stem(number), bytes(1000))
    for number in range(5):
        os.utime(old.path / f"{stem(number)}.bin", (number, number))
    made = store(tmp_path, cap=10_000)
    for number in range(5):
        made.write(stem(number), bytes(1000))
        os.utime(made.path / f"{stem(number)}.bin", (100 + number, 100 + number))
    old.read(stem(0))
    made.write(stem(9), bytes(1000))
    assert cache_upkeep.folder_bytes(tmp_path) <= 9_000
    assert made.evicted == 2
    assert sorted(path.stem for path in old.path.glob("*.bin")) == [stem(number) for number in (0, 3, 4)]
    assert len(list(made.path.glob("*.bin"))) == 6
    made.write(stem(10), bytes(20_000))
    assert made.read(stem(10)) is None


def test_prune(tmp_path: Path) -> None:
    """What was set aside or never finished goes first; what is not ours stays; locks in use stay."""
    made = store(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (made.path / "README").write_text("mine")
    for number in range(3):
        made.write(stem(number), bytes(100))
        with made.lock(stem(number)):
            pass
    made.quarantine(stem(0))
    stale, young = (made.path / f".{stem(7)}.{pid}.0.tmp" for pid in (1, 2))
    for path in (stale, young):
        path.write_bytes(bytes(100))
    os.utime(stale, (1, 1))
    with made.lock(stem(8)):
        done = cache_upkeep.prune(tmp_path, 1 << 20)
        assert (made.path / f"{stem(8)}.lock").exists()
    assert (done.removed, done.freed) == (0, 200)
    left = {path.name for path in made.path.iterdir()}
    assert left == {
        "README",
        young.name,
        f"{stem(8)}.lock",
        *(f"{stem(n)}.{suffix}" for n in (1, 2) for suffix in ("bin", "lock")),
    }
    found = cache_upkeep.contents(tmp_path)
    assert (found.entries, found.quarantined, found.unfinished, found.environments) == (2, 0, 1, 1)
    assert cache_upkeep.clear(tmp_path).removed == 2
    assert {path.name for path in made.path.iterdir()} == {"README"}
    assert (tmp_path / "notes.txt").exists()


def test_verify_names_what_is_bad(tmp_path: Path) -> None:
    """Verification finds the truncated, the renamed, the writable and the unsigned, and nothing else."""
    made = store(tmp_path)
    for number in range(5):
        made.write(stem(number), pack(stem(number), BINARY, b"code", 1.0, SECRET if number else None))
    assert cache_upkeep.broken_entries(tmp_path) == []
    paths = [made.path / f"{stem(number)}.bin" for number in range(5)]
    os.truncate(paths[1], 100)
    paths[2].rename(made.path / f"{stem(6)}.bin")
    paths[3].chmod(0o666)
    bad = dict(cache_upkeep.broken_entries(tmp_path, SECRET))
    assert set(bad) == {paths[0], paths[1], made.path / f"{stem(6)}.bin", paths[3]}
    assert "unsigned" in bad[paths[0]]
    assert "truncated" in bad[paths[1]]


def test_open_folder_closes_what_it_opened(tmp_path: Path) -> None:
    """Refused directories leak no descriptors."""
    tmp_path.chmod(0o777)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(UnsafeFolder):
            open_folder(tmp_path, (), create=False, check_base=True)
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------ locks


def test_lock_excludes_threads(tmp_path: Path) -> None:
    """One holder at a time, also within a process; a holder that never ends is not waited for for ever."""
    made = store(tmp_path, lock_seconds=0.1)
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with store(tmp_path).lock(STEM) as held:
                assert held
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]
    with store(tmp_path).lock(STEM), made.lock(STEM) as held:
        assert not held


def test_lock_that_was_cleaned_away(tmp_path: Path) -> None:
    """Whoever waits on a lock file that is removed meanwhile takes the new one: two holders at once are impossible."""
    made = store(tmp_path)
    got: list[bool] = []

    def wait() -> None:
        with made.lock(STEM) as held:
            got.append(held)
            assert (made.path / f"{STEM}.lock").exists()

    with made.lock(STEM):
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.05)
        (made.path / f"{STEM}.lock").unlink()
    thread.join(30)
    assert got == [True]


KILLED = """
    import os, random, signal, sys
    from pathlib import Path
    from emutpu.backend.cache_entry import pack
    from emutpu.backend.cache_store import DirectoryStore

    root, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    binary, stem = "0123456789abcdef", "_".join(("00112233445566ff",) * 3)
    dice = random.Random(seed)
    whole_write = os.write
    for number in range(count):
        child = os.fork()
        if child == 0:
            store = DirectoryStore(root, (binary,), shared_parts=0, cap=1 << 30)
            data = pack(stem, binary, dice.randbytes(dice.randrange(1, 50_000)), 1.0)
            cut, after = dice.randrange(len(data) + 1), dice.random() < 0.2

            def dying(descriptor, view, cut=cut):
                whole_write(descriptor, view[:cut])
                os.kill(os.getpid(), signal.SIGKILL)

            with store.lock(stem):
                if not after:
                    os.write = dying
                store.write(stem, data)
                os.kill(os.getpid(), signal.SIGKILL)
        dice.random(), dice.random()
        dice.seed(seed * 1_000_003 + number)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        store = DirectoryStore(root, (binary,), shared_parts=0, cap=1 << 30, lock_seconds=5.0)
        data = store.read(stem)
        if data is not None:
            from emutpu.backend.cache_entry import unpack
            unpack(data, stem, binary)
        with store.lock(stem) as held:
            assert held, "the lock of a dead process"
    print("survived", count)
"""


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.nightly)])
def test_kills_at_any_byte_of_a_write(tmp_path: Path, count: int) -> None:
    """Killing it after any number of bytes leaves no entry or a whole one, and never a lock."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), "1", str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == f"survived {count}", done.stderr
    found = cache_upkeep.contents(tmp_path)
    assert found.unfinished > count // 2
    assert cache_upkeep.broken_entries(tmp_path) == []
    for path in (tmp_path / BINARY).glob(".*.tmp"):
        os.utime(path, (1, 1))
    cache_upkeep.prune(tmp_path, 1 << 30)
    assert cache_upkeep.contents(tmp_path).unfinished == 0


WRITING = """
    import sys
    from pathlib import Path
    from emutpu.backend.cache_entry import pack
    from emutpu.backend.cache_store import DirectoryStore

    store = DirectoryStore(Path(sys.argv[1]), ("0123456789abcdef",), shared_parts=0, cap=1 << 30)
    print("ready", flush=True)
    for number in range(10**9):
        stem = "_".join([f"{number % 7:016x}"] * 3)
        with store.lock(stem):
            store.write(stem, pack(stem, "0123456789abcdef", bytes([number % 251]) * 100_000, 1.0))
"""


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.nightly)])
def test_kills_at_any_moment(tmp_path: Path, count: int) -> None:
    """Killing it from outside, at moments nobody chose: the entries that are there are whole, and of one piece."""
    dice = random.Random(2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    for _ in range(count):
        command = [sys.executable, "-c", textwrap.dedent(WRITING), str(tmp_path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(dice.random() * 0.05)
            child.send_signal(signal.SIGKILL)
            child.wait(30)
        made = store(tmp_path, lock_seconds=5.0)
        for number in range(7):
            data = made.read(stem(number))
            if data is not None:
                assert len(set(unpack(data, stem(number), BINARY).payload)) == 1
            with made.lock(stem(number)) as held:
                assert held
