"""Contracts beside kernels: what is read from them and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuverify.contract import kernels_in, limited_to, parse_contracts
from cuverify.errors import ContractError
from cuverify.expressions import Expression


def parse(*lines: str, values: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    text = "\n".join(f"// {line}" for line in ("@kernel k", *lines))
    return parse_contracts(text, name="x.cu", first_line=10, values=values)["k"]


def test_all_parts_of_a_parameter() -> None:
    contract = parse(
        "@param out write fp32 [rows, WIDTH] align=16   scaled rows",
        "@param x read bf16 [rows, max(WIDTH, 8), *] stride=(x_stride, 2 * WIDTH, 1)",
        "@param any? scratch uint8 [...]",
        "@param x_stride value int64",
        "@reach any update",
        "@block 32 * WARPS",
        "@shared 4 * WIDTH    bytes of one row",
    )
    out, x, anything, stride = contract.parameters
    assert (out.access, out.dtype.name, out.align, out.text) == ("write", "fp32", 16, "scaled rows")
    assert [e and e.text for e in x.shape] == ["rows", "max(WIDTH, 8)", None]
    assert [e.text for e in x.stride] == ["x_stride", "2 * WIDTH", "1"]
    assert x.align == 2 and not x.optional
    assert anything.optional and anything.shape is None
    assert stride.is_value and stride.bytes == 8
    assert contract.reach == {"any": "update"}
    assert contract.block({"WARPS": 4}) == 128 and contract.shared({"WIDTH": 5}) == 20
    assert contract.signature() == "k(out, x, any, x_stride)"


def test_limits_and_early_starts() -> None:
    contract = parse("@arch sm_90a sm_100a", "@early")
    assert contract.architectures == ("sm_90a", "sm_100a") and contract.early
    plain = parse("@block 32")
    assert plain.architectures == () and not plain.early
    assert limited_to("// @kernel k\n// @block 32\n") == ()
    assert limited_to("// @kernel k\n// @arch sm_90a sm_80\n// @kernel j\n// @arch sm_80\n") == (
        "sm_80",
    )


def test_a_dtype_may_be_a_value() -> None:
    line = "@param indices read INDEX [n]"
    assert parse(line, values={"INDEX": "long long"}).parameters[0].dtype.name == "int64"
    assert parse(line, values={"INDEX": "unsigned  int"}).parameters[0].dtype.name == "uint32"
    with pytest.raises(ContractError, match="`INDEX` is neither"):
        parse(line, values={"INDEX": "7"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("@param x", "wants `name access dtype"),
        ("@arch", "wants names such as sm_90a"),
        ("@arch sm_90a, sm_100a", "wants names such as sm_90a"),
        ("@early yes", "takes nothing behind it"),
        ("@param x reads fp32 [n]", "access `reads`"),
        ("@param x read fp31 [n]", "`fp31` is neither"),
        ("@param x read fp32", "a tensor has a \\[shape\\]"),
        ("@param n value int32 [1]", "a value has none"),
        ("@param x read fp32 [n] stride=(1, 1)", "one stride for each"),
        ("@param x read fp32 [n / 2]", "only whole numbers"),
        ("@param x read fp32 [n +]", "not an expression"),
        ("@param x read fp32 [__import__('os')]", "only whole numbers"),
        ("@param x read fp32 [True]", "only whole numbers"),
        ("@reach nowhere update", "a parameter declared above"),
        ("@shape x", "unknown tag @shape"),
        ("@kernel k", "two contracts"),
        ("@kernel 3", "wants the kernel's name"),
    ],
)
def test_malformed_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(ContractError, match=message) as caught:
        parse(line)
    assert str(caught.value).startswith("x.cu:11: ")


def test_declared_twice_and_before_any_kernel() -> None:
    with pytest.raises(ContractError, match="x.cu:12: .*declared twice"):
        parse("@param x read fp32 [n]", "@param x read fp32 [n]")
    with pytest.raises(ContractError, match="before any @kernel"):
        parse_contracts("// @param x read fp32 [n]")


def test_kernels_are_found_whatever_their_dress() -> None:
    text = """
    // __global__ void commented(int) {
    const char* s = "extern \\"C\\" __global__ void quoted(";
    extern "C" __global__ void plain(int n) {}
    extern "C" __global__ void __launch_bounds__(128, 2) bounded(int n) {}
    extern "C" __global__ __launch_bounds__(WARPS * (32)) void first(int n) {}
    extern "C" {
    __global__ void inside(int n) { if (n) { n = 1; } }
    /* __global__ void also_commented() {} */
    __global__ void
    broken_line(int n) {}
    }
    """
    assert kernels_in(text) == ("plain", "bounded", "first", "inside", "broken_line")


@pytest.mark.parametrize("text", ["__global__ void k(int n) {}", "template <int N> __global__ void k() {}",
                                  'extern "C" { } __global__ void k(int n) {}'])  # fmt: skip
def test_a_mangled_kernel_is_refused_with_advice(text: str) -> None:
    with pytest.raises(ContractError, match='`k` is not `extern "C"`'):
        kernels_in(text)


_numbers = st.integers(-1000, 1000)


@given(a=_numbers, b=_numbers, c=_numbers.filter(bool))
@example(a=-7, b=0, c=2)
def test_expressions_agree_with_python(a: int, b: int, c: int) -> None:
    text = "max(a, min(b, 3)) * 2 - (a + b) // c % 5 + ceil_div(a, c)"
    expected = max(a, min(b, 3)) * 2 - (a + b) // c % 5 + -(-a // c)
    expression = Expression(text)
    assert expression.names == {"a", "b", "c"}
    assert expression({"a": a, "b": b, "c": c}) == expected


def test_division_by_zero_is_an_error_of_the_contract() -> None:
    with pytest.raises(ContractError, match="divides by zero"):
        Expression("n // m")({"n": 1, "m": 0})
