"""Sizes of a program's inputs: sums, differences, products and floor divisions of integers and symbols.

torch.export evaluates an expression as Python by sympy, so none is passed on as the file has it: it is parsed here,
and written anew from what was parsed.
"""

from __future__ import annotations

import ast
import re

from gemel.models.errors import one_line
from gemel.models.graph.program_fields import MAX_INTEGER, ProgramFault

MAX_CHARACTERS = 400
"""Of an input's size: exporters write a symbol, at most a multiple of one."""
MAX_DEPTH = 40
TEXT = re.compile(r"[A-Za-z0-9_+\-*/(), '=]*")
SYMBOL = re.compile(r"s\d{1,9}")
OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}
FUNCTIONS = {"Add": "+", "Mul": "*", "FloorDiv": "//"}
"""What sympy calls them."""


class SizeParser:
    """Parses size expressions, and numbers their symbols: the same symbol has the same number in each."""

    def __init__(self) -> None:
        self.symbols: dict[str, str] = {}

    def rewrite(self, text: str) -> str:
        """An expression that says what `text` says; ProgramFault for one that is more than + - * // of sizes."""
        fault = ProgramFault(f"its program computes a size by '{one_line(text[:MAX_CHARACTERS])}'")
        if len(text) > MAX_CHARACTERS or not TEXT.fullmatch(text):
            raise fault
        try:
            return self._write(ast.parse(text.strip(), mode="eval").body, MAX_DEPTH)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise fault from error

    def number(self, symbol: str) -> str:
        """The name that we give a symbol."""
        return self.symbols.setdefault(symbol, f"s{len(self.symbols)}")

    def _write(self, node: ast.expr, depth: int) -> str:
        # Recursion must end before Python's own limit does.
        if not depth:
            raise ValueError("is nested too deep")
        if isinstance(node, ast.Constant):
            return _integer(node.value)
        if isinstance(node, ast.Name):
            return self._symbol(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return f"(-{self._write(node.operand, depth - 1)})"
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return self._join(OPERATIONS[type(node.op)], [node.left, node.right], depth - 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node.func.id, node, depth - 1)
        raise ValueError("no operation of sizes")

    def _call(self, function: str, call: ast.Call, depth: int) -> str:
        if function == "Symbol" and len(call.args) == 1 and isinstance(call.args[0], ast.Constant):
            return self._symbol(call.args[0].value)  # what it assumes follows from its being a size
        # Assumptions of sympy, which could say anything.
        if call.keywords:
            raise ValueError("names an argument")
        if function == "Integer" and len(call.args) == 1:
            return self._write(call.args[0], depth)
        if (
            function in FUNCTIONS
            and len(call.args) > 1
            and (function != "FloorDiv" or len(call.args) == 2)
        ):
            return self._join(FUNCTIONS[function], call.args, depth)
        raise ValueError("no function of sizes")

    def _join(self, operation: str, parts: list[ast.expr], depth: int) -> str:
        written = [self._write(part, depth) for part in parts]
        return (
            f"FloorDiv({', '.join(written)})"
            if operation == "//"
            else f"({operation.join(written)})"
        )

    def _symbol(self, name: object) -> str:
        if not isinstance(name, str) or not SYMBOL.fullmatch(name):
            raise ValueError("no symbol of a size")
        return f"Symbol('{self.number(name)}', positive=True, integer=True)"


def _integer(value: object) -> str:
    if type(value) is not int or value > MAX_INTEGER:
        raise ValueError("no integer of 64 bits")
    return str(value)
