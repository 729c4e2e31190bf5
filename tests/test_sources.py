"""A text, its values and its headers: found, checked, digested anew, put together."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuverify.directives import read_directives
from cuverify.errors import SourceError
from cuverify.sources import KernelSource, Value, is_cuda_header, render_value

KERNEL = 'extern "C" __global__ void k(float* p) { p[0] = 1; }\n'


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


# --- where a text comes from ---------------------------------------------------------------------


def test_a_file_is_named_as_given_and_searches_its_own_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "other").mkdir()
    write(tmp_path / "sub", k__cu='#include "h.cuh"\n' + KERNEL, h__cuh="// own\n")
    write(tmp_path / "other", h__cuh="// other\n")
    monkeypatch.chdir(tmp_path)
    source = KernelSource.from_file("sub/k.cu", include_dirs=["other"])
    assert source.name == "sub/k.cu"
    assert source.path == tmp_path / "sub" / "k.cu"
    assert source.headers() == (tmp_path / "sub" / "h.cuh",)
    assert source.include_dirs[:2] == (tmp_path / "sub", tmp_path / "other")
    monkeypatch.chdir("/")  # folders were made absolute
    assert source.headers() == (tmp_path / "sub" / "h.cuh",)


def test_the_package_s_headers_come_last_however_often_they_are_given(tmp_path: Path) -> None:
    package = KernelSource.from_text(KERNEL).include_dirs
    assert len(package) == 1
    assert package[0].name == "include"
    source = KernelSource.from_text(KERNEL, include_dirs=[*package, tmp_path, tmp_path])
    assert source.include_dirs == (tmp_path, *package)
    assert source.with_values().include_dirs == source.include_dirs


def test_the_package_s_kernels() -> None:
    source = KernelSource.from_package("relocate")
    assert source.name == "kernels_cu/relocate.cu"
    assert source.path is not None
    assert source.text == source.path.read_text()
    with pytest.raises(SourceError, match=r"'relocat', it has .*relocate.*did you mean 'relocate'"):
        KernelSource.from_package("relocat")
    with pytest.raises(SourceError, match=r"no kernel '\.\./x'"):
        KernelSource.from_package("../x")


def test_a_missing_file_says_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, kernel__cu=KERNEL)
    with pytest.raises(SourceError, match=r"kernl\.cu does not exist \(did you mean 'kernel\.cu'"):
        KernelSource.from_file(tmp_path / "kernl.cu")
    with pytest.raises(SourceError, match="is a folder"):
        KernelSource.from_file(tmp_path)


def test_texts_that_no_compiler_could_read(tmp_path: Path) -> None:
    (tmp_path / "latin.cu").write_bytes(b"int a;\n// caf\xe9\n")
    with pytest.raises(SourceError, match=r"latin\.cu:2: byte 0xe9 is not UTF-8"):
        KernelSource.from_file(tmp_path / "latin.cu")
    with pytest.raises(SourceError, match=r"<string>:3: the text holds a NUL"):
        KernelSource.from_text("int a;\n\nint \0b;")
    with pytest.raises(SourceError, match="surrogate"):
        KernelSource.from_text("// \ud800")
    with pytest.raises(SourceError, match="text is a bytes"):
        KernelSource.from_text(b"int a;")  # type: ignore[arg-type]


def test_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_bytes(b"\xef\xbb\xbfint a;\r\nint b;\r")
    assert KernelSource.from_file(tmp_path / "k.cu").text == "int a;\nint b;\n"


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\0b", "\ud800"])
def test_names_that_no_line_can_show(name: str) -> None:
    with pytest.raises(SourceError, match="name="):
        KernelSource.from_text(KERNEL, name=name)


@pytest.mark.parametrize("first_line", [0, -1, 2**31, True, 1.0])
def test_first_lines_that_are_none(first_line: int) -> None:
    with pytest.raises(SourceError, match="first_line="):
        KernelSource.from_text(KERNEL, first_line=first_line)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        KernelSource.from_text(KERNEL, include_dirs=[tmp_path / "nowhere"])


# --- headers -------------------------------------------------------------------------------------


def test_the_closure_of_the_includes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(
        tmp_path,
        a__cuh='#pragma once\n#include "sub/b.cuh"\n#  include <c.cuh>\n',
        c__cuh='#include "a.cuh"  // a cycle\n#include "c.cuh"\n',
        d__cuh="",
        m__cuh="wrong: b.cuh has one beside it",
        e__cuh="",
        unused__cuh="",
    )
    write(tmp_path / "sub", b__cuh='#include "m.cuh"\n#include "../d.cuh"\n', m__cuh="")
    source = KernelSource.from_text(
        '// #include "no1.cuh"\n/* \n#include "no2.cuh"\n*/ const char* s = "#include <no3.cuh>";\n'
        'const char* r = R"x(\n#include "no4.cuh"\n)x";\n'
        '#include "a.cuh"\n#ifdef NEVER\n#\\\ninclude "e.cuh"\n#endif\n#include <cuda_bf16.h>\n'
        "#include <cstdint>\n",
        include_dirs=[tmp_path],
    )
    found = [Path(os.path.normpath(path)).relative_to(tmp_path) for path in source.headers()]
    assert [path.as_posix() for path in found] == [
        "a.cuh",
        "e.cuh",
        "sub/b.cuh",
        "c.cuh",
        "sub/m.cuh",
        "d.cuh",
    ]


def test_cycles_through_folders_and_links_end(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, a__cuh='#include "sub/../a.cuh"\n#include "sub/b.cuh"\n', c__cuh="// here\n")
    write(tmp_path / "sub", real__cuh='#include "c.cuh"\n', c__cuh="// in sub\n")
    (tmp_path / "sub" / "b.cuh").symlink_to(tmp_path / "sub" / "real.cuh")
    (tmp_path / "link.cuh").symlink_to(tmp_path / "sub" / "real.cuh")
    source = KernelSource.from_text(
        '#include "a.cuh"\n#include "link.cuh"\n', include_dirs=[tmp_path]
    )
    found = [path.relative_to(tmp_path).as_posix() for path in source.headers()]
    assert found == ["a.cuh", "link.cuh", "sub/b.cuh", "c.cuh", "sub/c.cuh"]


def test_an_edited_header_gives_another_digest_and_the_old_one_back(tmp_path: Path) -> None:
    write(tmp_path, a__cuh='#include "b.cuh"\n', b__cuh="#define N 1\n")
    source = KernelSource.from_text('#include "a.cuh"\n', include_dirs=[tmp_path])
    first = source.digest()
    assert source.digest() == first
    write(tmp_path, b__cuh="#define N 2\n")
    second = source.digest()
    assert second != first
    write(tmp_path, b__cuh="#define N 1\n")
    assert source.digest() == first


def test_a_header_that_comes_to_stand_before_another_is_noticed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    write(tmp_path / "second", a__cuh="int second;\n")
    source = KernelSource.from_text(
        '#include "a.cuh"\n#if __has_include("late.cuh")\n#endif\n',
        include_dirs=[tmp_path / "first", tmp_path / "second"],
    )
    digests = {source.digest()}
    write(tmp_path / "first", late__cuh="")
    digests.add(source.digest())
    write(tmp_path / "first", a__cuh="int first;\n")
    digests.add(source.digest())
    assert len(digests) == 3
    assert source.headers()[0] == tmp_path / "first" / "a.cuh"


def test_a_digest_is_the_same_on_every_machine(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name / "sub").mkdir(parents=True)
        write(tmp_path / name, a__cuh='#include "sub/b.cuh"\n')
        write(tmp_path / name / "sub", b__cuh="")
        source = KernelSource.from_text(
            '#include "a.cuh"\n', name="k.cu", include_dirs=[tmp_path / name]
        )
        digests.add(source.digest())
    assert len(digests) == 1


def test_a_digest_depends_on_everything_else(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="", b__cuh="")
    text = "#ifndef N\n#define N 1\n#endif\n#ifndef M\n#define M 1\n#endif\n"

    def digest(*, body: str = text, name: str = "k", first: int = 1, **values: Value) -> str:
        return KernelSource.from_text(
            body, name=name, first_line=first, include_dirs=[tmp_path], values=values
        ).digest()

    digests = [
        digest(),
        digest(body=text + " "),
        digest(name="l"),
        digest(first=2),
        digest(N=1),
        digest(N=True),  # 1 == True, and yet another text
        digest(N=1.0),
        digest(N="1 "),
        digest(M=1),
        digest(N=1, M=2),
        digest(N=2, M=1),
        digest(body=text + '#include "a.cuh"\n'),
        digest(body=text + '#include "b.cuh"\n'),
    ]
    assert digest(N="1") == digest(N=1)
    digests.remove(digest(N="1 "))  # stripped: the same as 1
    assert len(set(digests)) == len(digests)


def test_missing_headers_name_the_line_that_wants_them(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r'cell \[3\]:8: #include "no.cuh" is not in .*include'):
        KernelSource.from_text('\n#include "no.cuh"\n', name="cell [3]", first_line=7)
    write(
        tmp_path,
        k__cu='#include "a.cuh"\n',
        a__cuh='#ifndef A\n#define A\n/*\n*/\n#include "no.cuh"\n#endif\n',  # in a guard only
    )
    with pytest.raises(SourceError, match=r'a\.cuh:5: #include "no.cuh" is not in'):
        KernelSource.from_file(tmp_path / "k.cu")


def test_a_header_that_goes_missing_later_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="")
    source = KernelSource.from_text('#include "a.cuh"\n', include_dirs=[tmp_path])
    (tmp_path / "a.cuh").unlink()
    for ask in (source.digest, source.headers, source.translation_unit, source.known_values):
        with pytest.raises(SourceError, match="<string>:1"):
            ask()


@pytest.mark.parametrize(
    "text",
    [
        '#ifdef CUVERIFY_HOST\n#include "only_on_the_host.h"\n#endif\n',
        '#if __has_include("perhaps.cuh")\n#include "perhaps.cuh"\n#endif\n',
        '#include "cuda_bf16.h"\n#include "cooperative_groups/reduce.h"\n#include <no/such>\n',
    ],
)
def test_headers_that_need_not_be_there(text: str) -> None:
    assert KernelSource.from_text(text).headers() == ()


@pytest.mark.parametrize("include", ["HEADER", "HEADER_OF(x)", "_next <a.cuh>"])
def test_includes_that_cannot_be_followed_are_refused(include: str) -> None:
    space = "" if include.startswith("_") else " "
    with pytest.raises(SourceError, match="<string>:2: #include .* cannot be followed"):
        KernelSource.from_text(f"\n#include{space}{include}\n")


def test_an_absolute_include_and_a_header_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.cuh").write_bytes(b"// caf\xe9\r\n#define N 1\r\n")
    source = KernelSource.from_text(f'#include "{tmp_path}/latin.cuh"\n')
    assert source.headers() == (tmp_path / "latin.cuh",)
    assert len(source.digest()) == 64


def test_which_headers_are_cuda_s() -> None:
    for name in ("cuda_bf16.h", "cuda/std/cstdint", "mma.h", "cooperative_groups.h", "cuda.h"):
        assert is_cuda_header(name), name
    for name in ("shared.cuh", "cudax", "vector.cuh", "my/cuda_bf16.h", "cstdint", "cuda_x.h"):
        assert not is_cuda_header(name), name


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (8, "8"),
        (-3, "(-3)"),
        (np.int64(7), "7"),
        (2**31 - 1, "2147483647"),
        (-(2**31), "(-2147483647 - 1)"),
        (-(2**63), "(-9223372036854775807 - 1)"),
        (2**63 - 1, "9223372036854775807"),
        (2**64 - 1, "18446744073709551615ull"),
        (1.0, "1.0f"),
        (1e-5, "1e-05f"),
        (1e22, "1e+22f"),
        (-0.5, "(-0.5f)"),
        (np.float32(0.25), "0.25f"),
        (0.1 + 0.2, "0.30000000000000004f"),
        ("__nv_bfloat16", "__nv_bfloat16"),
        ("1e-300", "1e-300"),
        (" (A + B) ", "(A + B)"),
        ("", ""),
        ('"a b"', '"a b"'),
    ],
)
def test_values_are_written_as_cpp(value: Value, text: str) -> None:
    assert render_value("N", value) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (2**64, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        (float("nan"), "no literal"),
        (float("-inf"), "no literal"),
        (1e39, "infinity"),
        (1e-46, "become 0"),
        ("1\n#define K", "line break"),
        ("1\\", "backslash"),
        ("1 /*", "comment"),
        ("1 // x", "comment"),
        ('"', "quote"),
        ("'", "quote"),
        ("a\0b", "control"),
        ("\udc00", "Unicode"),
        (None, "NoneType"),
        ([1], "list"),
        (1j, "complex"),
        (np.bool_(True), "is a bool"),
    ],
)
def test_values_that_cannot_be_written(value: Value, problem: str) -> None:
    with pytest.raises(SourceError, match=f"value N=.*{problem}"):
        render_value("N", value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1A",
        "A B",
        "A(x)",
        "A=1",
        "A\n",
        "é",
        "int",
        "defined",
        "__CUDA_ARCH__",
        "CUVERIFY_HOST",
    ],
)
def test_names_of_values_are_identifiers_of_one_s_own(name: str) -> None:
    with pytest.raises(SourceError, match="value name"):
        KernelSource.from_text(f"int {name};", values={name: 1})


DEFAULTS = """\
#ifndef GUARD_H
#define GUARD_H
#ifndef TILE
#define TILE (4 * /* wide
   */ 8)  // rows
#endif
#if !defined(WIDTH)
#  define WIDTH 16
#else
static_assert(WIDTH > 0, "");
#endif
#ifndef WITH_ARGUMENTS
#define WITH_ARGUMENTS(x) x
#endif
#ifdef FAST
#define STEPS 2
#endif
// @param q read bf16 [tokens, DIM]
// IN_A_COMMENT
const char* s = "IN_A_STRING";
int use = HEADS;
#endif
"""


def test_known_values_are_those_with_a_default(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="#ifndef DEPTH\n#define DEPTH 3\n#endif\n")
    source = KernelSource.from_text(DEFAULTS + '#include "a.cuh"\n', include_dirs=[tmp_path])
    assert source.known_values() == {"DEPTH": "3", "TILE": "(4 * 8)", "WIDTH": "16"}


def test_values_that_are_used_without_a_default() -> None:
    values: dict[str, Value] = {"HEADS": 8, "FAST": True, "DIM": 64}
    assert KernelSource.from_text(DEFAULTS, values=values).values == values


@pytest.mark.parametrize("name", ["TYLE", "IN_A_COMMENT", "IN_A_STRING", "R", "e5"])
def test_unknown_values_meet_the_list_of_the_known(name: str) -> None:
    with pytest.raises(SourceError, match=rf"'{name}'; known are: TILE \(default .*WIDTH") as error:
        KernelSource.from_text(DEFAULTS + "double d = 1e5; // R\n", values={name: 8})
    assert ("did you mean 'TILE'?" in str(error.value)) == (name == "TYLE")
    with pytest.raises(SourceError, match="known are: none"):
        KernelSource.from_text(KERNEL, values={"N": 1})


def test_a_value_that_the_text_would_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"<string>:12: #define N would win over the value N=4"):
        KernelSource.from_text("\n\n#define N 8\nint a = N;\n", values={"N": 4}, first_line=10)
    write(tmp_path, a__cuh="#ifdef X\n#define N 8\n#endif\n")
    with pytest.raises(SourceError, match=r"a\.cuh:2: #define N would win"):
        KernelSource.from_text(
            '#include "a.cuh"\nint a = N;\n', include_dirs=[tmp_path], values={"N": 4}
        )


def test_an_edited_header_can_make_a_value_unknown(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="#ifndef N\n#define N 8\n#endif\n")
    source = KernelSource.from_text('#include "a.cuh"\n', include_dirs=[tmp_path], values={"N": 1})
    write(tmp_path, a__cuh="#ifndef M\n#define M 8\n#endif\n")
    with pytest.raises(SourceError, match="'N'; known are: M"):
        source.digest()


def test_sources_are_values() -> None:
    text = "#ifndef A\n#define A 1\n#endif\n#ifndef B\n#define B 1\n#endif\n"
    one = KernelSource.from_text(text, values={"B": 2, "A": 1})
    two = KernelSource.from_text(text).with_values(A=1).with_values(B=3).with_values(B=2)
    assert one == two
    assert hash(one) == hash(two)
    assert list(one.values) == ["A", "B"]
    assert one.values == {"A": 1, "B": 2}
    assert one != one.with_values(A=True)
    assert one.values != {"A": 1}
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert again.digest() == one.digest()
    with pytest.raises(TypeError):
        one.values["A"] = 2  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.text = ""  # type: ignore[misc]


# --- put together --------------------------------------------------------------------------------


def test_a_translation_unit() -> None:
    source = KernelSource.from_text(
        "int a = N + SCALE;", name='a "b" \\c.cu', values={"SCALE": 1e-5, "N": 3}, first_line=4
    )
    lines = source.translation_unit(prefix='#include "x.h"', suffix="int z;\n").split("\n")
    assert lines == [
        f"// cuverify source {source.digest()}",
        '#include "x.h"',
        "#define N 3",
        "#define SCALE 1e-05f",
        '#line 4 "a \\"b\\" \\\\c.cu"',
        "int a = N + SCALE;",
        "int z;",
        "",
    ]


def test_a_cache_that_hashes_the_text_notices_an_edited_header(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="int a;\n")
    source = KernelSource.from_text('#include "a.cuh"\n', include_dirs=[tmp_path])
    before = source.translation_unit()
    write(tmp_path, a__cuh="int b;\n")
    assert source.translation_unit() != before


def test_lines_for_diagnostics(tmp_path: Path) -> None:
    write(tmp_path, a__cuh="one\ntwo\n", gen__cuh='#line 9 "x"\nint a;\n')
    source = KernelSource.from_text("first\nsecond", name="cell 2", first_line=5)
    assert source.source_line("cell 2", 6) == "second"
    assert source.source_line(str(tmp_path / "a.cuh"), 2) == "two"
    for file, line in (
        ("cell 2", 4),
        ("cell 2", 7),
        (str(tmp_path / "a.cuh"), 9),
        (str(tmp_path / "gen.cuh"), 1),  # its lines have other numbers
        (str(tmp_path / "none.cuh"), 1),
        ("<ptx>", 1),
        ("nul\0", 1),
    ):
        assert source.source_line(file, line) is None


# --- reading directives --------------------------------------------------------------------------


def test_line_numbers_survive_comments_splices_and_raw_strings() -> None:
    text = (
        '/* 1\n 2 */ int a; // 2 \\\n #include "in_comment_3.h"\n'
        "auto r = R\"(4\n5)\"; int big = 1'000'000; char q = '\"';\n"
        '#include "line_6.h" /* still\n'
        '7 */\n#inc\\\nlude <line_8.h>\n%:include "line_10.h"\n'
    )
    includes = read_directives(text).includes
    assert [(include.name, include.line) for include in includes] == [
        ("line_6.h", 6),
        ("line_8.h", 8),
        ("line_10.h", 10),
    ]


def test_a_comment_sign_in_angle_brackets_opens_none() -> None:
    text = "#include <a//b.h>\n#include <c/*d.h>\nint e;\n"
    found = read_directives(text)
    assert [include.name for include in found.includes] == ["a//b.h", "c/*d.h"]
    assert "e" in found.identifiers


@pytest.mark.parametrize(
    ("wrap", "conditional"),
    [
        ("{}", False),
        ("#ifndef G\n#define G\n{}\n#endif\n", False),
        ("#if !defined(G)\n#define G\n{}\n#endif // G\n", False),
        ("#ifndef G\n#define H\n{}\n#endif\n", True),
        ("#ifndef G\n#define G\n{}\n#endif\n#define LATER\n", True),
        ("#ifndef G\n#define G\n#if X\n{}\n#endif\n#endif\n", True),
        ("#if 0\n#else\n{}\n#endif\n", True),
        ("#if 0\n#endif\n{}\n", False),
        ("#endif\n{}\n", False),
    ],
)
def test_only_an_include_guard_is_no_condition(wrap: str, conditional: bool) -> None:
    include = read_directives(wrap.format('#include "a.h"')).includes[0]
    assert include.conditional is conditional


def test_importing_sources_loads_no_heavy_module() -> None:
    import subprocess
    import sys

    code = (
        "import sys, cuverify.sources, cuverify.compile, cuverify.diagnostics\n"
        "heavy = {'torch', 'cupy', 'numpy', 'hypothesis', 'click', 'elftools'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
    run([sys.executable, "-c", code], check=True)
