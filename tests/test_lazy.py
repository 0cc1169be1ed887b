"""Packages that import their names on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fulgurite
from fulgurite import lazy, models, quant

LAZY_PACKAGES = [fulgurite, models, quant]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", LAZY_PACKAGES, ids=lambda package: package.__name__)
def test_every_exported_name_is_imported_from_its_module(package):
    for name in package.__all__:
        assert getattr(package, name) is not None, name
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", LAZY_PACKAGES, ids=lambda package: package.__name__)
def test_the_imports_for_type_checkers_are_the_exported_names(package):
    with open(package.__file__, encoding="utf-8") as file:
        assert sorted(lazy.read_typing_imports(file.read())) == sorted(package.__all__)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'fulgurite' has no attribute 'compil'"):
        _ = fulgurite.compil
    assert not hasattr(fulgurite, "_private") and not hasattr(quant, "TYPES")


def test_a_function_wins_over_the_module_of_its_name():
    code = (
        "import fulgurite.compile, fulgurite.fuse, fulgurite.op\n"
        "from fulgurite.quantize import quantize\n"
        "names = ('compile', 'fuse', 'op', 'quantize')\n"
        "print(all(callable(getattr(fulgurite, name)) for name in names))\n"
        "from fulgurite import compile\n"
        "print(compile is fulgurite.compile, compile.__module__)"
    )
    assert run_python(code).split("\n") == ["True", "True fulgurite.compile"]


def test_attributes_can_be_replaced(monkeypatch):
    monkeypatch.setattr(fulgurite, "compile", 3)
    assert fulgurite.compile == 3


def test_import_needs_no_torch_and_modules_are_attributes():
    code = (
        "import sys, fulgurite\n"
        "fulgurite.__version__, dir(fulgurite), fulgurite.FulguriteError, fulgurite.SamplingParams\n"
        "print('torch' in sys.modules)\n"
        "print(fulgurite.models.load_model.__name__)"
    )
    assert run_python(code).split("\n") == ["False", "load_model"]
