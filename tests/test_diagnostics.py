"""Compilers' messages become data: every one of them, at its file, line and column."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cuverify.diagnostics import Diagnostic, parse_gnu, parse_nvrtc, with_excerpts


def places(found: tuple[Diagnostic, ...]) -> list[tuple[str, str]]:
    return [(entry.where, entry.severity) for entry in found]


# --- NVRTC: texts as NVRTC 12.9 wrote them -------------------------------------------------------


def test_nvrtc_two_errors_with_tabs_have_their_columns_from_the_caret() -> None:
    found = parse_nvrtc(
        'kernels_cu/x.cu(2): error: identifier "one" is undefined\n'
        "  \tint x = one;\n"
        "  \t        ^\n"
        "\n"
        'kernels_cu/x.cu(3): error: identifier "two" is undefined\n'
        "      \tp[0] = two + 1;\n"
        "      \t       ^\n"
        "\n"
        '2 errors detected in the compilation of "<cuverify>/unit.cu".\n'
    )
    assert found == (
        Diagnostic(
            "kernels_cu/x.cu",
            2,
            10,
            "error",
            'identifier "one" is undefined',
            "\tint x = one;\n\t        ^",
        ),
        Diagnostic(
            "kernels_cu/x.cu",
            3,
            13,
            "error",
            'identifier "two" is undefined',
            "    \tp[0] = two + 1;\n    \t       ^",
        ),
    )
    for entry in found:
        assert entry.column is not None
        line, caret = entry.excerpt.split("\n")
        assert line[entry.column - 1 :].startswith(entry.message.split('"')[1])
        assert caret.index("^") == entry.column - 1


def test_nvrtc_counts_bytes_and_we_count_characters() -> None:
    line = 'extern "C" __global__ void a(char** p) { p[0] = "漢字é"; nope; }'
    offset = len(line[: line.index("nope")].encode())
    found = parse_nvrtc(f"k.cu(1): error: bad\n  {line}\n  {' ' * offset}^\n")
    assert found[0].column == line.index("nope") + 1
    assert found[0].excerpt.split("\n")[1].index("^") == line.index("nope") + 2  # two wide letters


def test_nvrtc_notes_candidates_and_further_lines_of_a_message() -> None:
    found = parse_nvrtc(
        'unit.cu(3): error: no instance of overloaded function "f" matches the argument list\n'
        "            argument types are: (float *)\n"
        "  __global__ void a(float* p){ f(p); }\n"
        "                               ^\n"
        'unit.cu(2): note #3322-D: number of parameters of function "f(int, int)" does not match\n'
        "  __device__ void f(int, int);\n"
        "                  ^\n"
        "\n"
        '1 error detected in the compilation of "unit.cu".\n'
    )
    assert places(found) == [("unit.cu:3:30", "error"), ("unit.cu:2:17", "note")]
    assert found[0].message.endswith("argument list; argument types are: (float *)")
    assert found[1].message.endswith("does not match [#3322-D]")


def test_nvrtc_instantiations_are_notes_with_the_error_s_file_where_none_is_named() -> None:
    found = parse_nvrtc(
        "generated.cuh(50): error: expression must have class type\n"
        "  return v.nope();\n"
        "         ^\n"
        "          detected during:\n"
        '            instantiation of "auto A<T>::f() [with T=float]" at line 51\n'
        "            [ 190 instantiation contexts not shown ]\n"
        '            instantiation of "void g(T) [with T=float]" at line 3 of kernels_cu/x.cu\n'
        "\n"
        "k.cu(1): error: expression must have class type\n"
        "  return v.nope();\n"
        "         ^\n"
        '          detected during instantiation of "auto g(T) [with T=float]" at line 2\n'
        "\n"
        '2 errors detected in the compilation of "unit.cu".\n'
    )
    assert places(found) == [
        ("generated.cuh:50:8", "error"),
        ("generated.cuh:51", "note"),
        ("generated.cuh:50", "note"),
        ("kernels_cu/x.cu:3", "note"),
        ("k.cu:1:8", "error"),
        ("k.cu:2", "note"),
    ]
    assert found[1].message == 'instantiation of "auto A<T>::f() [with T=float]"'
    assert found[5].message == 'instantiation of "auto g(T) [with T=float]"'


def test_nvrtc_warnings_figures_and_what_is_passed_over() -> None:
    found = parse_nvrtc(
        'cell [3](7): warning #177-D: variable "x" was declared but never referenced\n'
        "    int x;\n"
        "        ^\n"
        "\n"
        'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n'
        "\n"
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_80'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized\n"
        "ptxas warning : For profile sm_90 adjusting per thread register count of 16\n"
        'nvrtc: warning: "--std (-std)=c++17" followed by "--std (-std)=c++20"\n'
        "\0"
    )
    assert [entry.severity for entry in found] == ["warning"] * 4
    assert found[0].where == "cell [3]:7:7"
    assert found[0].message == 'variable "x" was declared but never referenced [#177-D]'
    assert [entry.where for entry in found[1:]] == ["<ptxas>", "<ptxas>", "<nvrtc>"]


def test_nvrtc_fatal_forms() -> None:
    found = parse_nvrtc(
        'k.cu(2): catastrophic error: cannot open source file "cstdint"\n'
        "  #include <cstdint>\n"
        "                    ^\n"
        "\n"
        'At end of source: error: expected a "}"\n'
        "k.cu(1): note #3196-D: to match this\n"
        "  {\n"
        "  ^\n"
        "\n"
        "Error limit reached.\n"
        '2 errors detected in the compilation of "unit.cu".\n'
        "Compilation terminated.\n"
    )
    assert places(found) == [
        ("k.cu:2:19", "error"),
        ("unit.cu", "error"),
        ("k.cu:1:1", "note"),
        ("<nvrtc>", "note"),
    ]


def test_ptxas_errors_name_lines_of_ptx_and_the_abort_says_nothing_more() -> None:
    abort = "ptxas fatal   : Ptx assembly aborted due to errors\n"
    found = parse_nvrtc(
        "ptxas application ptx input, line 29; error   : Unknown modifier '.op'\n"
        "ptxas application ptx input, line 33; error   : Unknown modifier '.op2'\n" + abort + "\0"
    )
    assert places(found) == [("<ptx>:29", "error"), ("<ptx>:33", "error")]
    assert places(parse_nvrtc(abort)) == [("<ptxas>", "error")]
    assert parse_nvrtc("ptxas fatal   : Unresolved extern function '_Z1fi'\n\0")[0].message == (
        "Unresolved extern function '_Z1fi'"
    )


def test_names_with_brackets_and_quotes_stay_whole() -> None:
    found = parse_nvrtc('we "q" (3).cu(12): error: x\n  a\n  ^\n')
    assert found[0].where == 'we "q" (3).cu:12:1'


def test_an_empty_log_is_no_diagnostic() -> None:
    assert parse_nvrtc("") == ()
    assert parse_gnu("") == ()


# --- g++ and clang++ -----------------------------------------------------------------------------

GCC = """\
In file included from inner.h:1,
                 from kernels_cu/x.cu:1:
inner.h: In function 'int q()':
inner.h:3:24: error: 'missing' was not declared in this scope
    3 | inline int q(){ return missing; }
      |                        ^~~~~~~
inner.h:4:23: error: 'nope' was not declared in this scope
    4 | #define BAD(x) ((x) + nope)
      |                       ^~~~
inner.h:5:24: note: in expansion of macro 'BAD'
    5 | inline int r(){ return BAD(1); }
      |                        ^~~
kernels_cu/x.cu: In function 'void k(int*)':
kernels_cu/x.cu:5:9: error: 'undefined1' was not declared in this scope
kernels_cu/x.cu:5:6: warning: unused variable 'x' [-Wunused-variable]
kernels_cu/x.cu: In instantiation of 'auto A<T>::f() [with T = float]':
kernels_cu/x.cu:3:43:   required from 'void g(T) [with T = float]'
kernels_cu/x.cu:7:4:   required from here
kernels_cu/x.cu:2:54: error: request for member 'nope'
"""


def test_gcc() -> None:
    found = parse_gnu(GCC)
    assert places(found) == [
        ("inner.h:3:24", "error"),
        ("inner.h:4:23", "error"),
        ("inner.h:5:24", "note"),
        ("kernels_cu/x.cu:5:9", "error"),
        ("kernels_cu/x.cu:5:6", "warning"),
        ("kernels_cu/x.cu:2:54", "error"),
        ("kernels_cu/x.cu:3:43", "note"),  # how it came to be stands behind the error
        ("kernels_cu/x.cu:7:4", "note"),
    ]
    assert found[0].excerpt == "inline int q(){ return missing; }\n" + " " * 23 + "^"
    assert found[3].excerpt == ""  # g++ opens no file of the name that #line gave
    assert found[6].message == "required from 'void g(T) [with T = float]'"


def test_excerpts_are_filled_in_and_columns_made_those_of_the_line() -> None:
    text = {("kernels_cu/x.cu", 5): '\tauto* x = "漢字" + undefined1;  '}
    line = text["kernels_cu/x.cu", 5]

    def source_line(file: str, number: int) -> str | None:
        return text.get((file, number))

    # g++ without the line counts bytes, a tab being one
    offset = len(line[: line.index("undefined1")].encode())
    bare = parse_gnu(f"kernels_cu/x.cu:5:{offset + 1}: error: nope\n")
    # clang++ with the line expands tabs; wide letters take two columns
    shown = line.expandtabs(8).rstrip()
    wide = shown.index("undefined1") + 2
    framed = parse_gnu(
        f"kernels_cu/x.cu:5:{offset + 1}: error: nope\n    5 | {shown}\n      | {' ' * wide}^~~~\n"
    )
    for found in (bare, framed):
        entry = with_excerpts(found, source_line)[0]
        assert entry.column == line.index("undefined1") + 1
        excerpt, caret = entry.excerpt.split("\n")
        assert excerpt == line.rstrip()
        assert caret.startswith("\t")  # so that the caret stands right at any width of tabs
        assert caret.expandtabs(8).index("^") == wide


def test_an_excerpt_that_the_source_contradicts_is_kept() -> None:
    found = parse_nvrtc("k.cu(1): error: x\n  shown by NVRTC\n  ^\n")
    assert with_excerpts(found, lambda file, line: "another text") == found
    assert with_excerpts(found, lambda file, line: None) == found


CLANG = """\
In file included from kernels_cu/x.cu:1:
In file included from ./h1.h:1:
./h2.h:5:24: error: use of undeclared identifier 'nope'
    5 | inline int r(){ return BAD(1); }
      |                        ^~~~~~
./h2.h:4:23: note: expanded from macro 'BAD'
    4 | #define BAD(x) ((x) + nope)
      |                       ^~~~
kernels_cu/x.cu:5:10: error: use of undeclared identifier 'undefined1'
    5 |         int x = undefined1;
      |                 ^~~~~~~~~~
kernels_cu/x.cu:2:53: error: member reference base type 'float' is not a structure or union
    2 | template<class T> struct A { T v; auto f(){ return v.nope(); } };
      |                                                    ~^~~~~
kernels_cu/x.cu:7:3: note: in instantiation of function template specialization 'g<float>'
    7 |   g(1.0f);
      |   ^
fatal error: too many errors emitted, stopping now [-ferror-limit=]
20 errors generated.
"""


def test_clang() -> None:
    found = parse_gnu(CLANG)
    assert places(found) == [
        ("./h2.h:5:24", "error"),
        ("./h2.h:4:23", "note"),
        ("kernels_cu/x.cu:5:17", "error"),
        ("kernels_cu/x.cu:2:53", "error"),
        ("kernels_cu/x.cu:7:3", "note"),
        ("<compiler>", "error"),
    ]


@pytest.mark.parametrize("colour", [False, True])
def test_frames_without_line_numbers(colour: bool) -> None:
    """clang++ before 17 and g++ before 9 show the line bare; the latter behind one space."""
    error = "\x1b[0;1;31merror: \x1b[0mbad" if colour else "error: bad"
    clang = parse_gnu(f"x.cu:3:7: {error}\n  a = nope;\n      ^~~~\n")[0]
    assert (clang.where, clang.excerpt) == ("x.cu:3:7", "  a = nope;\n      ^")
    gcc = parse_gnu(f"x.cu:3:7: {error}\n   a = nope;\n       ^~~~\n")[0]
    assert (gcc.where, gcc.excerpt) == ("x.cu:3:7", "  a = nope;\n      ^")


def test_linkers_and_drivers() -> None:
    found = parse_gnu(
        "/usr/bin/ld: /tmp/cc.o: in function `k':\n"
        "kernels_cu/x.cu:12: undefined reference to `f(int)'\n"
        "/usr/bin/ld: g2.cpp:(.text+0xa): undefined reference to `g(int)'\n"
        "/usr/bin/ld: cannot find -lnothing\n"
        "collect2: error: ld returned 1 exit status\n"
    )
    assert places(found) == [
        ("kernels_cu/x.cu:12", "error"),
        ("<linker>", "error"),
        ("<linker>", "error"),
    ]
    assert found[1].message == "undefined reference to `g(int)'"
    lld = parse_gnu(
        "ld.lld: error: undefined symbol: undefined_fn(int)\n"
        ">>> referenced by kernels_cu/x.cu:4 (kernels_cu/x.cu:4)\n"
    )
    assert places(lld) == [("kernels_cu/x.cu:4", "error")]
    assert lld[0].message == "undefined symbol: undefined_fn(int)"
    driver = parse_gnu(
        "cc1plus: fatal error: nofile.cpp: No such file or directory\ncompilation terminated.\n"
        "g++: error: unrecognized command-line option '-fnope'\n"
        'error: unknown clang option: "-fnope"\n'
    )
    assert places(driver) == [("<cc1plus>", "error"), ("<g++>", "error"), ("<compiler>", "error")]
    assert places(parse_gnu("collect2: error: ld returned 1 exit status\n")) == [
        ("<collect2>", "error")
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_gcc_itself(tmp_path: Path) -> None:
    text = ["template <class T>", "void g(T t) {", "\tt.nope();", "}"]
    text += ["void k() {", '  "漢字", one;', "\tint x = two;", "  g(1);", "}"]
    (tmp_path / "unit.cpp").write_text("\n".join(['#line 1 "kernels_cu/x.cu"', *text, ""]))
    answer = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "unit.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )
    found = with_excerpts(
        parse_gnu(answer.stderr),
        lambda file, line: text[line - 1] if file == "kernels_cu/x.cu" else None,
    )
    errors = [entry for entry in found if entry.severity == "error"]
    assert [entry.line for entry in errors] == [6, 7, 3]
    for entry, word in zip(errors[:2], ("one", "two"), strict=True):
        assert entry.column == text[entry.line - 1].index(word) + 1
        assert entry.excerpt.startswith(text[entry.line - 1] + "\n")
    assert [(entry.line, entry.severity) for entry in found[-1:]] == [(8, "note")]


def test_str_is_what_an_editor_reads() -> None:
    entry = Diagnostic("k.cu", 3, 2, "error", "bad", "ab\n ^")
    assert str(entry) == "k.cu:3:2: error: bad\n    ab\n     ^"
    assert str(Diagnostic("k.cu", 0, None, "error", "bad", "")) == "k.cu: error: bad"
