"""How large the project is: files, lines and tokens of Python by top folder, then the functions
that are longer than a screen. Nothing is tested against these figures.

    make size
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "envs", "losses", "agents", "serving", "profiling", "experiments", "knobwise", "testbeds"
)  # fmt: skip
REST = ("tests", "campaign", "benchmarks", "docs", "examples")
SCREEN = 60
"""Lines of a function, from `def` to its end."""
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
"""What is not counted as a token, nor are docstrings."""


def files_of(folder: str) -> list[Path]:
    """The Python files under a folder. Links in knobwise/ lead to the other folders."""
    linked = [path for path in (ROOT / folder).iterdir() if path.is_symlink()]
    files = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in files if set(linked).isdisjoint(path.parents)]


def tokens_of(source: str) -> int:
    """The tokens of code: a name, a number, a string or a sign counts as one."""
    docstrings = sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in ast.walk(ast.parse(source))
    )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT for token in tokens) - docstrings


def long_functions(path: Path) -> list[tuple[int, str]]:
    """Lines and name of each function of a file that is longer than a screen."""
    functions = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > SCREEN:
                functions.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return functions


def main() -> None:
    functions = []
    print(f"{'':12}{'files':>8}{'lines':>9}{'tokens':>9}")
    for name, folders in (("product", PRODUCT), ("beside it", REST)):
        total = [0, 0, 0]
        for folder in folders:
            sources = [path.read_text() for path in files_of(folder)]
            lines = sum(len(source.splitlines()) for source in sources)
            row = [len(sources), lines, sum(map(tokens_of, sources))]
            print(f"{folder:12}{row[0]:8,}{row[1]:9,}{row[2]:9,}")
            total = [sum(pair) for pair in zip(total, row, strict=True)]
            if folders is PRODUCT:
                functions += [long for path in files_of(folder) for long in long_functions(path)]
        print(f"{name:12}{total[0]:8,}{total[1]:9,}{total[2]:9,}\n")
    print(f"{len(functions)} functions of the product over {SCREEN} lines:")
    for lines, where in sorted(functions, reverse=True):
        print(f"{lines:6} {where}")


if __name__ == "__main__":
    main()
