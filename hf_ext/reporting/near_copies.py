"""What the leak report says about near copies, as sentences; said the same in logs, reports and cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_near_copies(leaks: Mapping[str, Any] | None) -> list[str]:
    """Sentences for the highest and the other identities, of rows and of each column; `leaks` as `leak_report` gives.

    Only what was found is told; where there is nothing, the list is empty.
    """
    if not leaks or not leaks.get("row"):
        return []
    compared, columns = leaks.get("compared", "test"), leaks.get("columns", {})
    if len(columns) < 2:
        lines = [_sentence(leaks["row"], compared, "")]
    else:
        lines = [_sentence(leaks["row"], compared, " in every column")]
        lines += [_sentence(leak, compared, f" in the column {name}") for name, leak in columns.items()]
    return [line for line in lines if line]


def describe_repeated(leaks: Mapping[str, Any] | None) -> str:
    """The sentence that names rows which stand in train, too; "" where there are none."""
    row = (leaks or {}).get("row") or {}
    num = row.get("num_test_rows_in_train", 0)
    if not leaks or not num:
        return ""
    compared, whole = leaks.get("compared", "test"), row["num_test_rows"]
    named = [f"{compared} row {here} is train row {there}" for here, there in leaks.get("repeated") or []]
    listed = f": {', '.join(named)}{', ...' if num > len(named) else ''}" if named else ""
    return (
        f"{num:,} of {whole:,} {compared} rows ({num / whole:.1%}) stand in train, too{listed}. On these, any score is "
        "memory."
    )


def count_near(near: Mapping[str, Any], num_checked: int) -> str:
    """As "1,234 of 2,000"."""
    return f"{near['num_rows']:,} of {num_checked:,}"


def _sentence(leak: Mapping[str, Any], compared: str, where: str) -> str:
    told = [near for near in leak.get("near") or [] if near["num_rows"]]
    if not told:
        return ""
    num_checked, num_rows = leak["num_checked"], leak["num_test_rows"]
    of = f" (of {num_rows:,})" if num_checked < num_rows else ""
    identity = f"a training sequence at >= {100 * told[0]['identity']:.3g}% identity{where}"
    if told[0]["num_rows"] == num_checked:
        return f"Every one of {num_checked:,} checked {compared} rows{of} has {identity}."
    others = "".join(f"; {count_near(near, num_checked)} at >= {100 * near['identity']:.3g}%" for near in told[1:])
    return f"{count_near(told[0], num_checked)} checked {compared} rows{of} have {identity}{others}."
