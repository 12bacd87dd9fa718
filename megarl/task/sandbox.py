"""The limits of user code: what the kernel keeps a program from (namespaces, Landlock, seccomp, limits of time, memory
and files), and the launcher that starts a Python program which a model wrote within them.

`run_python` starts the launcher and holds the other end of its standard input: one line of JSON comes from there, and
when it closes, because the owner is done or dead, the program is killed. One line of JSON goes back. A function of the
user's has a process of its own for many calls (`megarl.task.process`), which takes its seal from here.

Standard library only, so that the launcher, which runs without site-packages, starts at once. Linux only; functions
that ask the kernel raise OSError where it or its administrator refuses.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.signals import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, list_descendants, reap

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
"""What programs need of the system, to read"""
ROOT = Path(__file__).resolve().parents[2]
PROTECTIONS = ("namespaces", "landlock", "seccomp")
START_S = 60.0
"""Seconds beyond a program's own time for starting and ending it on a busy machine"""
_LAUNCH = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from megarl.task.sandbox import main; main()"
_RUN = "import runpy, sys; sys.path += {}; sys.argv = ['main.py']; runpy.run_path('main.py', None, '__main__')"
GAPS = {
    "it can read and write the files of this user (neither user namespaces nor Landlock)": {"namespaces", "landlock"},
    "it can reach the network (neither user namespaces nor seccomp)": {"namespaces", "seccomp"},
    "it can start processes, and the memory limit is that of each (no seccomp)": {"seccomp"},
    "the size of its files is limited for each, not together (no user namespaces)": {"namespaces"},
}
"""What is not kept from a program, and the protections of which one keeps it"""


class SandboxError(Exception):
    """The program was not run: the sandbox could not be made."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_s: float = 10.0
    memory_mb: int = 1024
    """Address space in MiB"""
    files_mb: int = 64
    """MiB of files that it writes, together, or of each where it has no file system of its own"""
    open_files: int = 64
    threads: int = 64
    output_kb: int = 256
    """KiB that it may print, on each of standard output and error"""


@dataclass(frozen=True)
class Finished:
    """How a program ended."""

    stdout: str
    stderr: str
    status: int
    """Exit status, or minus the number of the signal that ended it"""
    stopped: str | None
    """Why it was ended: "time", "output"; None: it ended by itself"""
    limits: Limits = field(repr=False)

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.stopped is None and self.status == 0

    def describe(self) -> str:
        """How it ended, as one line."""
        match self.stopped:
            case "time":
                return f"it took longer than {self.limits.wall_s:g} s"
            case "output":
                return f"it printed more than {self.limits.output_kb} KiB"
        last = self.stderr.strip().rpartition("\n")[2].strip()
        if self.status == 0:
            return "it ended well"
        return last if self.status == 1 and last else f"it ended with {describe_status(self.status)}"


def run_python(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str] | None = None,
    protections: tuple[str, ...] | None = None,
    running: set["subprocess.Popen[bytes]"] | None = None,
) -> Finished:
    """Run a Python program in a folder of its own, which is removed with all that the program started.

    It may import what is installed beside megarl, read Python's own folders and the system's libraries, write to its
    folder, and start threads but no processes; its environment is empty. files: texts of the folder, by name.
    protections: of PROTECTIONS; None: all that this machine has. running: has the program while it runs; terminate() on
    what is in it, from any thread, ends it. Raises SandboxError where the protections cannot be had, and where it was
    ended so.
    """
    limits, running = limits or Limits(), set() if running is None else running
    task = {
        "arguments": [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-c", _RUN.format(list_packages())],
        # The order of a set of texts is the same in each run.
        "environment": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        "files": {**(files or {}), "main.py": source},
        "stdin": stdin,
        "limits": {**asdict(limits), "cpu_s": int(limits.wall_s) + 1},
        "readable": list_readable(),
        "protections": find_protections() if protections is None else protections,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        cwd="/",
    )
    running.add(process)
    seconds = limits.wall_s + START_S
    try:
        line = exchange(process, json.dumps(task).encode() + b"\n", seconds)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not answer within {seconds:g} s") from None
    finally:
        running.discard(process)
        assert process.stdin is not None
        process.stdin.close()  # The launcher then ends its program and itself; it is killed where it does not.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=START_S)
        end_process(process)
    if line is None:
        raise SandboxError(f"the sandbox ended without an answer ({describe_status(process.returncode)})")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise SandboxError(f"the sandbox could not be made: {answer['error']}")
    return Finished(**answer, limits=limits)


@functools.cache
def find_protections() -> tuple[str, ...]:
    """Those of PROTECTIONS that this machine has, each found by running a program with it."""
    found = []
    for name in PROTECTIONS:
        with contextlib.suppress(SandboxError):
            done = run_python("print(6 * 7)", limits=Limits(wall_s=30.0), protections=(name,))
            found += [name] if done.is_well and done.stdout == "42\n" else []
    return tuple(found)


def warn_of_gaps(key: str) -> None:
    """A RuntimeWarning where this machine does not keep programs from something; key: the setting that runs them."""
    has = set(find_protections())
    if gaps := "; ".join(gap for gap, kept_by in GAPS.items() if not has & kept_by):
        text = f"{key}: programs that the policy writes run here, and not everything is kept from one: {gaps}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has the standard library, no files and no network; what it prints is returned.
    """
    done = run_python(code, limits=Limits(wall_s=5.0))
    if done.is_well:
        return done.stdout
    return f"{done.stdout}error: {done.describe()}"


def describe_status(status: int) -> str:
    """An exit status in words: "signal SIGSEGV" or "exit status 3"."""
    names = {-number: number.name for number in signal.Signals}
    return f"signal {names.get(status, -status)}" if status < 0 else f"exit status {status}"


def exchange(process: "subprocess.Popen[bytes]", line: bytes, seconds: float) -> bytes | None:
    """Write a line and read one without its end; None where the process closed its end. Raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    reader, writer = process.stdout.fileno(), process.stdin.fileno()
    received, deadline = b"", time.monotonic() + seconds
    os.set_blocking(writer, False)
    unwritten = memoryview(line)
    while not received.endswith(b"\n"):
        poll = select.poll()  # Unlike select(), with descriptors above 1023 too.
        poll.register(reader, select.POLLIN | select.POLLHUP)
        if unwritten:
            poll.register(writer, select.POLLOUT)
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not ready:
            raise TimeoutError
        if writer in ready:
            try:
                unwritten = unwritten[os.write(writer, unwritten[:65536]) :]
            except BrokenPipeError:
                return None
        if reader in ready:
            chunk = os.read(reader, 65536)
            if not chunk:
                return None
            received += chunk
    return received[:-1]


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its group, and close its pipes."""
    kill_group(process)
    process.wait(timeout=30)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its group, before it is reaped: until then the number is still the group's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def list_packages() -> list[str]:
    """The folders of installed packages."""
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def list_readable() -> list[str]:
    """The folders that a program may read, none within another."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    own |= {*list_packages()}
    own |= set(map(os.path.realpath, own))  # A virtual environment may be a link.
    found: list[str] = []
    for path in [*SYSTEM, *sorted(own)]:
        if not any(path == other or path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


MIB = 2**20
_USER, _PID, _NET, _IPC, _UTS, _MOUNTS = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _REMOUNT, _READ_ONLY, _NO_SUID, _NO_DEV = 4096, 16384, 1 << 18, 32, 1, 2, 4
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_NO_NEW_PRIVS = 38
INSIDE_ID = 1000
"""User and group of the program within its namespace"""
NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(number: int) -> None:
    """This process gets the signal when its parent ends."""
    _check(_LIBRARY.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0))


def enter_namespaces() -> None:
    """User, mount, network, IPC and host name of this process become its own, and its children's process numbers."""
    uid, gid, kinds = os.getuid(), os.getgid(), _USER | _PID | _NET | _IPC | _UTS | _MOUNTS
    if uid != 0:
        _check(_LIBRARY.unshare(kinds))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE_ID} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE_ID} {gid} 1")
        return
    # Only a process outside may map two users; root's program shall run as nobody.
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        status = 1
        try:
            os.close(go_write)
            if os.read(go_read, 1):
                for kind in ("uid", "gid"):
                    Path(f"/proc/{os.getppid()}/{kind}_map").write_text(f"0 0 1\n{INSIDE_ID} {NOBODY} 1\n")
                status = 0
        finally:
            os._exit(status)
    try:
        _check(_LIBRARY.unshare(kinds))
        os.write(go_write, b"1")
    finally:
        os.close(go_read)
        os.close(go_write)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the users of the namespace could not be mapped")


def build_root(readable: Iterable[str], files_mb: int) -> None:
    """A file system with nothing but `readable`, some devices, and an empty /tmp of files_mb MiB, for this process."""
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


def limit_resources(allowed: dict[str, int], own_files: bool) -> None:
    """The limits that every kernel has. Threads only where the kernel counts none of other programs."""
    limits = {
        resource.RLIMIT_CPU: allowed["cpu_s"],
        resource.RLIMIT_AS: allowed["memory_mb"] * MIB,
        resource.RLIMIT_FSIZE: allowed["files_mb"] * MIB,
        resource.RLIMIT_NOFILE: allowed["open_files"],
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE), 0),
        **({resource.RLIMIT_NPROC: allowed["threads"]} if own_files else {}),
    }
    for number, limit in limits.items():
        limit_resource(number, limit)


def limit_resource(number: int, limit: int) -> None:
    """This process gets no more than that, nor than it was allowed before. number: one of resource.RLIMIT_*."""
    _, hard = resource.getrlimit(number)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(number, (lower, lower))


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


def _check(result: int, what: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}" if what else os.strerror(number))


_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
"""From this number on x86-64 has its calls a second time."""
_CLONE_THREAD = 0x10000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables below and the kernel's number"""

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "socket": (41, 198),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "acct": (163, 89),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
}  # fmt: skip
_CHANGES_FILES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
"""Owner, rights and times of files, which Landlock does not keep"""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_OWN_PROCESS_ONLY = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
"""Allowed where the first argument, a process, is the caller or 0"""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def build_filter(machine: str, pid: int, own_files: bool) -> bytes:
    """The filter's instructions (classic BPF, 8 bytes each).

    It refuses new processes (threads are not), sockets, signals to others, and calls that change the machine, look into
    other processes, make files without a name, or get around such a filter.
    """
    column, architecture = _ARCHITECTURES[machine]
    refuse = _ERRNO | errno.EPERM
    code = [_emit(_LOAD, _ARCHITECTURE), _emit(_EQUAL, architecture, 1, 0), _emit(_RETURN, _KILL)]
    code.append(_emit(_LOAD, _NUMBER))
    if machine == "x86_64":
        code += [_emit(_AT_LEAST, _X32, 0, 1), _emit(_RETURN, refuse)]
    for numbers in (_REFUSED if own_files else {**_REFUSED, **_CHANGES_FILES}).values():
        if (number := numbers[column]) is not None:
            code += [_emit(_EQUAL, number, 0, 1), _emit(_RETURN, refuse)]
    # The C library then takes clone, whose flags can be seen.
    code += [_emit(_EQUAL, _CLONE3[column], 0, 1), _emit(_RETURN, _ERRNO | errno.ENOSYS)]
    first, allow_or_refuse = _emit(_LOAD, _FIRST_ARGUMENT), [_emit(_RETURN, _ALLOW), _emit(_RETURN, refuse)]
    code += [_emit(_EQUAL, _CLONE[column], 0, 4), first, _emit(_ANY_BIT, _CLONE_THREAD, 0, 1), *allow_or_refuse]
    for numbers in _OWN_PROCESS_ONLY.values():
        own = [_emit(_EQUAL, 0, 1, 0), _emit(_EQUAL, pid, 0, 1)]
        code += [_emit(_EQUAL, numbers[column], 0, 5), first, *own, *allow_or_refuse]
    return b"".join([*code, _emit(_RETURN, _ALLOW)])


def refuse_calls(pid: int, own_files: bool) -> None:
    """Put the filter on this process and what it becomes; it cannot be taken off.

    pid: the number under which the process knows itself. own_files: it has a file system of its own; else it may not
    change owner, rights and times of files.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    instructions = build_filter(platform.machine(), pid, own_files)
    program = _Program(len(instructions) // 8, instructions)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        _check(_LIBRARY.prctl(*arguments, 0, 0), "seccomp")


def _emit(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


KILL_DEADLINE_S = 10.0


def main() -> None:
    """Serve one program. SIGTERM ends it, and what is left of it is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # The owner is dead.
        return
    with contextlib.suppress(BrokenPipeError):
        write_line(1, run(json.loads(line)))


def run(task: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Finished`, or {"error"} where the program could not be started as asked."""
    # Processes below this one whose parent ends become its children.
    _check(_LIBRARY.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    own_files = "namespaces" in task["protections"]
    folder = "/tmp"  # Of the program's own file system.
    try:
        if own_files:
            enter_namespaces()
        else:
            folder = tempfile.mkdtemp(prefix="megarl-sandbox-")
        return supervise(task, folder)
    except OSError as error:
        return {"error": str(error)}
    finally:
        end_descendants()
        if not own_files:
            shutil.rmtree(folder, ignore_errors=True)


def supervise(task: dict[str, Any], folder: str) -> dict[str, Any]:
    """Start the program, and watch it until it ends or has to."""
    reports, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    text = os.memfd_create("stdin")
    with os.fdopen(os.dup(text), "wb") as file:
        file.write(task["stdin"].encode())
    os.lseek(text, 0, os.SEEK_SET)
    task["launcher"] = os.getpid()
    child = os.fork()
    if child == 0:
        become_first(task, folder, (text, outputs[1], errors[1]), reports[1])
    for descriptor in (reports[1], outputs[1], errors[1], text):
        os.close(descriptor)
    streams = {outputs[0]: bytearray(), errors[0]: bytearray(), reports[0]: bytearray()}
    stopped = watch(streams, task["limits"]["wall_s"], task["limits"]["output_kb"] * 1024, reports[0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    end_descendants()
    report: dict[str, Any] = json.loads(streams[reports[0]].partition(b"\n")[0] or "{}")
    if "error" in report:
        return report
    if not stopped:
        # What was in the pipes when the program ended.
        stopped = watch(streams, KILL_DEADLINE_S, task["limits"]["output_kb"] * 1024, None)
    status = report.get("status", -signal.SIGKILL)
    return {
        "stdout": streams[outputs[0]].decode(errors="replace"),
        "stderr": streams[errors[0]].decode(errors="replace"),
        "status": status,
        "stopped": "time" if status == -signal.SIGXCPU else stopped,
    }


def watch(streams: dict[int, bytearray], seconds: float, limit: int, until: int | None) -> str | None:
    """Read until all streams end, or the stream `until`; why it was broken off, else None."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(0, select.POLLIN)
    open_streams = set(streams)
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    while open_streams and (until is None or until in open_streams):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready or time.monotonic() > deadline:
            return "time"
        for descriptor, _ in ready:
            if descriptor == 0:
                return "owner"
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poll.unregister(descriptor)
                open_streams.discard(descriptor)
            streams[descriptor] += chunk[: limit - len(streams[descriptor])]
            if descriptor != until and len(streams[descriptor]) >= limit:
                return "output"
    return None


def become_first(task: dict[str, Any], folder: str, streams: tuple[int, int, int], report: int) -> None:
    """The first process of the program's namespace: makes its file system, starts it and reports its exit status."""
    try:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() not in (0, task["launcher"]):  # It ended before; 0 is one outside of the namespace.
            os._exit(1)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.dup2(report, 3)
        os.closerange(4, 1 << 16)
        os.set_inheritable(3, False)
        report = 3
        if "namespaces" in task["protections"]:
            build_root(task["readable"], task["limits"]["files_mb"])
        for name, text in task["files"].items():
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(file.name, 0o644)
        own = os.getpid()
        program = os.fork()
        if program == 0:
            become_program(task, folder, own)
        for number in range(3):
            os.close(number)
        while True:
            pid, status = os.wait()
            if pid == program:
                break
        write_line(report, {"status": os.waitstatus_to_exitcode(status)})
    except Exception as error:
        # Of the program before it runs, too: the first line counts.
        write_line(report, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def become_program(task: dict[str, Any], folder: str, parent: int) -> None:
    """Start the program as a child of the process `parent`, within its limits."""
    limits, own_files = task["limits"], "namespaces" in task["protections"]
    os.setsid()
    os.umask(0o077)
    os.chdir(folder)
    if own_files and os.getuid() == 0:  # Root within its namespace becomes a user without rights.
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # It ended before.
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    limit_resources(limits, own_files)
    if "landlock" in task["protections"]:
        allow_files(task["readable"], folder)
    if "seccomp" in task["protections"]:
        refuse_calls(os.getpid(), own_files)
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **task["environment"]}
    os.execve(task["arguments"][0], task["arguments"], environment)


def write_line(descriptor: int, message: dict[str, Any]) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def end_descendants() -> None:
    """Kill everything below this process until nothing is left."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline and reap():
        for pid in list_descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
