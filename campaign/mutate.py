"""Damage by structure (fields, types, lengths, numbers) and by bytes."""

import csv
import io
import json
import re
from collections import defaultdict

import numpy as np
import polars as pl

DEEP = "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 20_000 + "1" + "}" * 20_000
NUMBERS, WEIRD, CELLS = map(
    str.split,
    (
        "NaN Infinity -Infinity -1 1e999 1e308 -0.0 123456789012345678901234567890 0.5",
        r'null true false "" "7" "x" [] {} [1,2] "\u0000" "../.."',
        'nan inf -1 1e999 true x 07 1_0 " null 0x10 \u0663',
    ),
)
NAMES = "", "cpu_ms", "extra", "question_id", "repeat"
"""Of columns, some of which mean something."""
WEIRD += NUMBERS
CELLS += ["", " 1 ", "9" * 40]


class Raw(str):
    """Text that stands in JSON as it is."""


def damaged(content, random, others):
    """Some bytes flipped, cut, put in, lost, repeated, zeroed, or taken from another file."""
    out = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place = random.randrange(len(out) + 1)
        length = random.choice((1, 2, 8, 64, 512))
        match random.randrange(8):
            case 0 | 1 if place < len(out):
                out[place] ^= 1 << random.randrange(8)
            case 2:
                del out[place:]
            case 3:
                out[place:place] = random.randbytes(length)
            case 4:
                del out[place : place + length]
            case 5:
                out[place:place] = out[place : place + length]
            case 6:
                out[place : place + length] = bytes(len(out[place : place + length]))
            case _:
                other = random.choice(others)
                start = random.randrange(len(other) + 1)
                out[place : place + length] = other[start : start + length]
    return bytes(out)


def json_changed(content, random, others):
    """A field of a JSON document (or of some line of JSON lines) changed in one or two ways."""
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    number = random.choice([i for i, line in enumerate(lines) if line.strip()])
    if len(lines) > 1 and random.random() < 0.2:
        line = lines[number]
        lines[number : number + 1] = random.choice(([], [line, line], [line[: len(line) // 2]]))
        return b"\n".join(lines)
    tree = json.loads(lines[number], object_pairs_hook=lambda pairs: {"": list(map(list, pairs))})
    for _ in range(random.choice((1, 1, 2))):
        tree = _tree_changed(tree, random)
    lines[number] = _dumped(tree).encode(errors="surrogatepass")
    return b"\n".join(lines)


def _is_object(value):
    return isinstance(value, dict)


def _tree_changed(tree, random):
    """Objects are {"": [[key, value], …]}, so that a key may occur twice."""
    # by the key in an object: rare fields as often as those of which there are many
    places = defaultdict(list)

    def walk(value):
        if _is_object(value):
            for pair in value[""]:
                places[pair[0]].append((pair, 1))
                walk(pair[1])
        elif isinstance(value, list):
            for i, part in enumerate(value):
                places[""].append((value, i))
                walk(part)

    top = [tree]
    walk(top)
    holder, i = random.choice(places[random.choice(sorted(places))])
    value = holder[i]
    action = random.randrange(6)
    if action == 0 and _is_object(value) and value[""]:
        pair = random.choice(value[""])
        change = random.choice(("drop", "twice", "rename"))
        if change == "drop":
            value[""].remove(pair)
        elif change == "twice":
            value[""].append([pair[0], random.choice((pair[1], Raw(random.choice(WEIRD))))])
        else:
            pair[0] = random.choice((pair[0] + "_", pair[0].upper(), "", "sample_id", "__class__"))
    elif action == 1 and isinstance(value, list) and value:
        part = random.randrange(len(value))
        old, new = value[part], Raw(random.choice(WEIRD))
        value[part : part + 1] = random.choice(([], [old, old], [old, new]))
    elif action == 2 and random.random() < 0.2:
        holder[i] = Raw(random.choice(DEEP))
    elif action == 3 and isinstance(value, int | float) and not isinstance(value, bool):
        numbers = -value, value + 1, value * 10, value / 3, float(value)
        holder[i] = random.choice((*numbers, str(value), [value]))
    else:
        holder[i] = Raw(random.choice(NUMBERS if action == 4 else WEIRD))
    return top[0]


def _dumped(value):
    if isinstance(value, Raw):
        return str(value)
    if _is_object(value):
        pairs = ", ".join(f"{json.dumps(key)}: {_dumped(part)}" for key, part in value[""])
        return f"{{{pairs}}}"
    return f"[{', '.join(map(_dumped, value))}]" if isinstance(value, list) else json.dumps(value)


def csv_changed(content, random, others):
    """Columns and rows dropped, twice, renamed or swapped; cells of other kinds; ragged rows."""
    rows = list(csv.reader(io.StringIO(content.decode())))
    for _ in range(random.choice((1, 1, 2))):
        column, row = random.randrange(len(rows[0])), random.randrange(1, len(rows))
        match random.randrange(8):
            case 0:
                rows = [line[:column] + line[column + 1 :] for line in rows]
            case 1:
                rows = [line + line[column : column + 1] for line in rows]
            case 2:
                rows[0][column] = random.choice((*rows[0], *NAMES))
            case 3:
                del rows[row]
            case 4:
                rows.insert(random.randrange(1, len(rows)), list(rows[row]))
            case 5:
                rows[row] = random.choice((rows[row][:-1], [*rows[row], "1"], [], rows[row][::-1]))
            case _ if column < len(rows[row]):
                rows[row][column] = random.choice((*CELLS, *random.choice(rows)))
            case _:
                rows[row] = [random.choice(CELLS) for _ in rows[row]]
    out = io.StringIO()
    csv.writer(out, lineterminator=random.choice(("\n", "\r\n"))).writerows(rows)
    return out.getvalue().encode()


def text_changed(content, random, others):
    """A line or a value of YAML dropped, twice, or of another kind."""
    lines = content.decode().split("\n")
    number = random.randrange(len(lines))
    key = re.split(r"(?<=:) |(?<=- )", lines[number], maxsplit=1)[0]
    code = "!!python/object/apply:os.getcwd []"
    odd = ["[" * 3000, "{a: " * 500, "&a [*a, *a]", "${a}", "!!map x", code]
    value = random.choice((*WEIRD, *odd, "*x", "'", "{", "2026-01-01", "~", "1:2:3", "0o7"))
    lines[number : number + 1] = random.choice(
        ([], [lines[number]] * 2, [f"{key} {value}"], [f"  {lines[number]}"])
    )
    return "\n".join(lines).encode()


def frame_changed(frame, random):
    """A table with a column or some values changed."""
    column, row = random.choice(frame.columns), random.randrange(frame.height)
    numeric = [name for name in frame.columns if frame[name].dtype.is_numeric()]
    match random.randrange(8):
        case 0:
            return frame.drop(column)
        case 1:
            name = random.choice((f"{column}_", "sample_id_", *NAMES))
            return frame if name in frame.columns else frame.rename({column: name})
        case 2:
            lists = pl.List(pl.Int64)
            kinds = pl.String, pl.Float32, pl.Boolean, lists, pl.Binary, pl.Categorical
            kind = random.choice(kinds)
            try:
                return frame.with_columns(pl.col(column).cast(kind, strict=False))
            except pl.exceptions.PolarsError:
                return frame.with_columns(pl.lit([1, 2]).alias(column))
        case 3:
            return frame.filter(pl.int_range(pl.len()) != row)
        case 4:
            return pl.concat([frame, frame[row : row + 1]])
        case 5:
            return frame.head(random.choice((0, 1, 2)))
        case 6:
            value = random.choice((None, pl.date(2026, 1, 1), [1], {"a": 1}, b"x", "x", True))
            return frame.with_columns(pl.lit(value, allow_object=False).alias(column))
        case _:
            column = random.choice(numeric)
            value = random.choice((None, float("nan"), float("inf"), -1.0, 1e300, 1e39, 2.0, 0.5))
            changed = pl.when(pl.int_range(pl.len()) == row).then(pl.lit(value))
            return frame.with_columns(changed.otherwise(pl.col(column)).alias(column))


def tree_of_arrays_changed(tree, random, wrap):
    """Nested dicts and lists with arrays or tensors at the ends: a part dropped, renamed, of
    another kind or length, or with numbers that are not finite."""
    places = []

    def walk(holder):
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list) and len(places) < 5000:
                walk(holder[key])

    walk(tree)
    holder, key = random.choice(places)
    value = holder[key]
    match random.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            name = f"{key}_" if random.random() < 0.5 else random.choice(list(holder))
            holder[name] = holder.pop(key)
        case 2:
            values = None, True, -1, 1e30, np.nan, "x", [], {}, wrap(np.zeros(3))
            holder[key] = random.choice(values)
        case _ if hasattr(value, "dtype") and value.ndim:
            array = np.array(value)
            flat = array.reshape(-1)
            if random.random() < 0.4:
                twice = np.concatenate([array, array])
                array = random.choice((array[:-1], twice, array[None], flat, array[:0]))
            elif random.random() < 0.3:
                kinds = np.float64, np.int8, np.complex64, bool, np.uint64
                array = array.astype(random.choice(kinds))
            elif flat.size:
                wrong = random.choice((np.nan, np.inf, -np.inf, -1, 1e30, 0))
                with np.errstate(all="ignore"):
                    flat[random.randrange(flat.size)] = np.array(wrong).astype(array.dtype)
                array = flat.reshape(array.shape)
            holder[key] = wrap(array)
        case _ if isinstance(value, int | float | str):
            holder[key] = random.choice((str(value), [value], np.nan, -1, 10**30, None))
    return tree
