"""Errors of the user's program and of capture: their types, and the user's line."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.capture import dynamo
from fulgurite.capture.dynamo import clean_exception_text, is_capturing
from fulgurite.errors import ArgumentError, CompileError, GraphBreakError, OpError

ANY = torch.randn(2, 3)


@pytest.mark.parametrize(
    "kind", [ValueError, IndexError, RuntimeError, KeyError, TypeError, KeyboardInterrupt]
)
def test_exceptions_of_the_program_are_unchanged(kind):
    def f(x):
        y = x + 1
        if y.shape[0] == 2:
            raise kind("mine")
        return y

    with pytest.raises(kind, match="mine") as caught:
        fulgurite.compile(f)(ANY)
    assert type(caught.value) is kind


def test_fullgraph_error_names_the_exception():
    def f(x):
        raise ValueError("mine")

    with pytest.raises(GraphBreakError, match=r"raises ValueError\('mine'\)") as caught:
        fulgurite.compile(f, fullgraph=True)(ANY)
    assert "test_dynamo.py" in caught.value.details["where"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError('mine')", "ValueError('mine')"),
        ("ValueError([ConstantVariable(str: 'mine')])", "ValueError('mine')"),
        (
            "KeyError([ConstantVariable(str: 'a (b)'), ConstantVariable(int: 3)])",
            "KeyError('a (b)', 3)",
        ),
        ("RuntimeError([])", "RuntimeError()"),
    ],
)
def test_exception_text_is_the_same_in_every_torch_version(text, expected):
    assert clean_exception_text(text) == expected


def test_op_that_rejects_its_inputs_is_named():
    def f(x):
        return x @ x

    with pytest.raises(OpError, match="matmul") as caught:
        fulgurite.compile(f)(ANY)
    assert isinstance(caught.value, RuntimeError)
    assert "return x @ x" in caught.value.details["where"]
    assert "size=(2, 3)" in caught.value.details["input"]


def test_operator_without_a_fake_function_raises():
    @fulgurite.op("test_dynamo::no_rule")
    def no_rule(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(ArgumentError, match="no fake .meta. function"):
        fulgurite.compile(lambda x: no_rule(x) + 1)(ANY)


def test_unknown_backend_options_list_what_is_allowed():
    with pytest.raises(Exception, match="may hold executors, transforms"):
        torch.compile(lambda x: x + 1, backend="fulgurite", options={"fast": True})(ANY)


def test_unwritable_repro_folder_hides_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FULGURITE_REPRO_DIR", str(tmp_path / "file" / "folder"))

    def fails(trace):
        raise ValueError("mine")

    with pytest.raises(CompileError, match="ValueError: mine") as caught:
        fulgurite.compile(lambda x: x + 1, transforms=[fails])(ANY)
    assert "FULGURITE_REPRO_DIR" in caught.value.details["repro"]


def test_exporting_a_compiled_module_exports_the_module():
    compiled = fulgurite.compile(torch.nn.Linear(3, 3))
    assert not is_capturing()
    for strict in (True, False):
        exported = torch.export.export(compiled, (ANY,), strict=strict).module()
        torch.testing.assert_close(exported(ANY), compiled(ANY))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_traces_the_original():
    module, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    compiled, function = fulgurite.compile(module), fulgurite.compile(torch.relu)
    torch.testing.assert_close(torch.jit.trace(compiled, x)(x), module(x))
    torch.testing.assert_close(torch.jit.trace(function, x)(x), x.relu())


def test_guards_are_timed_only_for_their_log(monkeypatch):
    timed: list[int] = []
    monkeypatch.setattr(dynamo, "_profile_guard_manager", lambda *args: timed.append(1) or 1.0)
    fulgurite.compile(torch.sin)(torch.ones(3))
    assert not timed
    monkeypatch.setattr(dynamo._guards_log, "isEnabledFor", lambda level: level >= logging.DEBUG)
    torch._dynamo.reset()
    fulgurite.compile(torch.cos)(torch.ones(3))
    assert timed


def test_replaced_torch_compile(monkeypatch):
    """A package that replaces `torch.compile`, as Lightning does, sees the user's calls only."""
    original = torch.compile

    @functools.wraps(original)
    def copy_options(model, **options):
        compiled = original(model, **options)
        if isinstance(model, nn.Module):
            compiled._compile_kwargs = copy.deepcopy(options)
        return compiled

    monkeypatch.setattr(torch, "compile", copy_options)
    model = nn.Linear(3, 2)
    torch.testing.assert_close(fulgurite.compile(model)(ANY), model(ANY))
    assert not hasattr(model, "_compile_kwargs")
