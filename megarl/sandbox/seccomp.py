"""A filter of system calls for programs that are not trusted (seccomp, Linux; x86-64 and aarch64).

Refused are new processes (threads are not), sockets, signals to others, and calls that change the machine, look into
other processes, make files without a name, or get around such a filter.
"""

import ctypes
import errno
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
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
    """The filter's instructions (classic BPF, 8 bytes each). Raises KeyError for a machine without a table."""
    column, architecture = _ARCHITECTURES[machine]
    refuse = _ERRNO | errno.EPERM
    code = [
        _emit(_LOAD, _ARCHITECTURE),
        _emit(_EQUAL, architecture, 1, 0),
        _emit(_RETURN, _KILL),
        _emit(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_emit(_AT_LEAST, _X32, 0, 1), _emit(_RETURN, refuse)]
    for numbers in (_REFUSED if own_files else {**_REFUSED, **_CHANGES_FILES}).values():
        if (number := numbers[column]) is not None:
            code += [_emit(_EQUAL, number, 0, 1), _emit(_RETURN, refuse)]
    # The C library then takes clone, whose flags can be seen.
    code += [_emit(_EQUAL, _CLONE3[column], 0, 1), _emit(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        _emit(_EQUAL, _CLONE[column], 0, 4),
        _emit(_LOAD, _FIRST_ARGUMENT),
        _emit(_ANY_BIT, _CLONE_THREAD, 0, 1),
        _emit(_RETURN, _ALLOW),
        _emit(_RETURN, refuse),
    ]
    for numbers in _OWN_PROCESS_ONLY.values():
        code += [
            _emit(_EQUAL, numbers[column], 0, 5),
            _emit(_LOAD, _FIRST_ARGUMENT),
            _emit(_EQUAL, 0, 1, 0),
            _emit(_EQUAL, pid, 0, 1),
            _emit(_RETURN, _ALLOW),
            _emit(_RETURN, refuse),
        ]
    return b"".join([*code, _emit(_RETURN, _ALLOW)])


def refuse_calls(pid: int, own_files: bool) -> None:
    """Put the filter on this process and what it becomes; it cannot be taken off.

    pid: the number under which the process knows itself. own_files: it has a file system of its own; else it may not
    change owner, rights and times of files. Raises OSError where the kernel has no such filters.
    """
    try:
        instructions = build_filter(platform.machine(), pid, own_files)
    except KeyError:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}") from None
    library = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions) // 8, instructions)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        if library.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _emit(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
