"""What the kernel keeps a program from: namespaces, Landlock and limits, applied to the calling process.

Standard library only. Linux only; each function raises OSError where the kernel or its administrator refuses.
"""

import contextlib
import ctypes
import os
import resource
import struct
import tempfile
from collections.abc import Iterable, Sequence

MIB = 2**20
_USER, _PID, _NET, _IPC, _UTS, _MOUNTS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _REMOUNT, _READ_ONLY, _NO_SUID, _NO_DEV = 4096, 16384, 1 << 18, 32, 1, 2, 4
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
INSIDE_ID = 1000
"""User and group of the program within its namespace"""
NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(number: int) -> None:
    """This process gets the signal when its parent ends."""
    _check(_LIBRARY.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def adopt_descendants() -> None:
    """Processes below this one whose parent ends become its children."""
    _check(_LIBRARY.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def enter_namespaces() -> None:
    """User, mount, network, IPC and host name of this process become its own, and its children's process numbers."""
    uid, gid = os.getuid(), os.getgid()
    go_read, go_write = os.pipe()
    done_read, done_write = os.pipe()
    # Only a process outside may map two users; root's program shall run as nobody.
    helper = os.fork() if uid == 0 else None
    if helper == 0:
        try:
            os.read(go_read, 1)
            for kind in ("uid", "gid"):
                with open(f"/proc/{os.getppid()}/{kind}_map", "w") as file:
                    file.write(f"0 0 1\n{INSIDE_ID} {NOBODY} 1\n")
            os.write(done_write, b"1")
        finally:
            os._exit(0)
    try:
        _check(_LIBRARY.unshare(_USER | _PID | _NET | _IPC | _UTS | _MOUNTS))
        if helper is None:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{INSIDE_ID} {uid} 1")
            _write("/proc/self/gid_map", f"{INSIDE_ID} {gid} 1")
    finally:
        if helper is not None:
            os.write(go_write, b"1")
            os.close(done_write)
            done = os.read(done_read, 1)
            os.waitpid(helper, 0)
        for descriptor in (go_read, go_write, done_read, *(() if helper is not None else (done_write,))):
            os.close(descriptor)
    if helper is not None and not done:
        raise OSError("the users of the namespace could not be mapped")


def build_root(readable: Iterable[str], files_mb: int) -> None:
    """A file system with nothing but `readable`, some devices, and an empty /tmp of files_mb MiB.

    In a mount namespace of this process's own.
    """
    _LIBRARY.unshare(_MOUNTS)
    root = "/sys"  # Any directory that is everywhere and of which the program needs nothing.
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEV, "size=4m,mode=755")
    for path in readable:
        _show(path, root)
    for path in DEVICES:
        _show(path, root, writable=True)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NO_SUID | _NO_DEV, f"size={files_mb}m,nr_inodes=10k,mode=1777")
    os.chdir(root)
    _check(_LIBRARY.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
    _check(_LIBRARY.umount2(b".", _DETACH))
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEV)


def become_nobody() -> None:
    """Where this process is root within its namespace, it becomes a user without rights."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)


def allow_files(readable: Sequence[str], writable: str | None) -> None:
    """Landlock: nothing but `readable`, the devices and the folder `writable`; no TCP, no signals to others."""
    abi = _LIBRARY.syscall(_LANDLOCK_CREATE, 0, 0, 1)
    _check(abi)
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    of_files = everything & (1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15)
    read = 1 << 0 | 1 << 2 | 1 << 3
    network, scopes = 3 if abi >= 4 else 0, 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", everything, network, scopes)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = _LIBRARY.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    _check(rules)
    allowed = {**dict.fromkeys(readable, read), **dict.fromkeys(DEVICES, everything)}
    if writable is not None:
        allowed[writable] = everything
    for path, access in allowed.items():
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access &= everything if os.path.isdir(path) else of_files
            _check(_LIBRARY.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, descriptor), 0))
            os.close(descriptor)
    _check(_LIBRARY.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_LIBRARY.syscall(_LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def limit_resources(*, cpu_s: int, memory_mb: int, files_mb: int, open_files: int, threads: int | None) -> None:
    """The limits that every kernel has; threads: None where the kernel would count those of other programs too."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_mb * MIB,
        resource.RLIMIT_FSIZE: files_mb * MIB,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        **({} if threads is None else {resource.RLIMIT_NPROC: threads}),
    }
    for number, limit in limits.items():
        _, hard = resource.getrlimit(number)
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (lower, lower))


def make_folder() -> str:
    """A folder for a program that shares the machine's file system."""
    return tempfile.mkdtemp(prefix="megarl-sandbox-")


def _show(path: str, root: str, writable: bool = False) -> None:
    """Makes `path` visible at the same place below `root`."""
    if not os.path.lexists(path) or os.path.lexists(root + path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        return
    if os.path.isdir(path):
        os.mkdir(root + path)
    else:
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, root + path, None, _BIND | _RECURSIVE)
    if not writable:
        attributes = struct.pack("=QQQQ", _READ_ONLY | _NO_SUID | _NO_DEV, 0, 0, 0)
        arguments = (_AT_FDCWD, (root + path).encode(), _AT_RECURSIVE, attributes, len(attributes))
        _check(_LIBRARY.syscall(_MOUNT_SETATTR, *arguments))


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(_LIBRARY.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}" if what else os.strerror(number))
