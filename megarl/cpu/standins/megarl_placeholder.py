"""Packages made of placeholders: every submodule imports, every name reads, and nothing can be called."""

import importlib.abc
import importlib.machinery
import sys
import types


def _build_error(name):
    return NotImplementedError(
        f"{name} was called: it has no CPU build, and megarl's stand-in for {name.split('.')[0]} "
        "gives a body only to what a plain decoder model needs"
    )


class _PlaceholderType(type):
    def __getattr__(cls, name):
        """Members of enumerations (`InterpolationMode.BILINEAR`) are read while SGLang loads."""
        return _read_member(f"{cls.__module__}.{cls.__name__}", name)


class Placeholder(metaclass=_PlaceholderType):
    """A class without a meaning on a CPU: it can be read, subclassed and used as an annotation."""

    def __init__(self, *args, **kwargs):
        raise _build_error(f"{type(self).__module__}.{type(self).__name__}")


class Function:
    """A function or a table of constants (`scalar_types.uint4b8`) without a meaning on a CPU."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise _build_error(self.__name__)

    def __getattr__(self, name):
        return _read_member(self.__name__, name)


def _read_member(owner, name):
    if name.startswith("_"):
        raise AttributeError(f"{owner} has no attribute {name}")
    return Function(f"{owner}.{name}")


def get_placeholder(module, name):
    """The submodule `module.name` where one is imported, else a class or (small first letter) a function."""
    if name.startswith("__"):
        raise AttributeError(f"module {module} has no attribute {name}")
    found = sys.modules.get(f"{module}.{name}")
    if found is not None:
        return found
    if name[0].isupper():
        return _PlaceholderType(name, (Placeholder,), {"__module__": module})
    return Function(f"{module}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        value = get_placeholder(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package):
        self.prefix = f"{package}."

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self.prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def open_package(package):
    """From here on every `import package.a.b` succeeds; files of this folder come first."""
    sys.meta_path.append(_Finder(package))
