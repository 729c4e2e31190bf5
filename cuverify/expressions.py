"""Arithmetic over named whole numbers, as contracts use it for extents, strides and sizes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from cuverify.errors import ContractError

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "min": min,
    "max": max,
    "ceil_div": lambda a, b: -(-a // b),
}


class Expression:
    """A parsed expression: whole numbers, names, ``+ - * // %``, ``min``, ``max``, ``ceil_div``.

    Parameters
    ----------
    text : str
        Such as ``4 * tile + HEADS``. A single ``/`` between whole numbers is refused.

    Raises
    ------
    ContractError
        If the text is anything else.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            raise ContractError(f"`{self.text}` is not an expression: {error.msg}") from None
        self.names = frozenset(self._check(self._tree))

    def _check(self, node: ast.expr) -> set[str]:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int()):
                return set()
            case ast.Name(id=name):
                return {name}
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._check(left) | self._check(right)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return set().union(*(self._check(arg) for arg in args))
        raise ContractError(
            f"`{self.text}`: only whole numbers, names, + - * // % and "
            f"{', '.join(_FUNCTIONS)} are allowed"
        )

    @property
    def symbol(self) -> str | None:
        """The name, where the expression is nothing but one."""
        return self._tree.id if isinstance(self._tree, ast.Name) else None

    def __call__(self, names: Mapping[str, int]) -> int:
        """Return the value; all of `self.names` must be in `names`."""
        return self._evaluate(self._tree, names)

    def _evaluate(self, node: ast.expr, names: Mapping[str, int]) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._evaluate(left, names), self._evaluate(right, names)
                try:
                    return _BINARY[type(op)](a, b)
                except ZeroDivisionError:
                    raise ContractError(f"`{self.text}` divides by zero") from None
            case ast.Call(func=ast.Name(id=name), args=args):
                return _FUNCTIONS[name](*(self._evaluate(arg, names) for arg in args))
        raise AssertionError(node)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"
