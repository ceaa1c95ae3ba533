"""The Models page's texts: models in words, and what came of work on them."""

from __future__ import annotations

import time

from PySide6.QtCore import QCoreApplication, QDateTime, QLocale

from app.models.library import Column, ModelRow
from app.services.library import Work
from app.widgets.fit_table import speed_words, verdict_words
from app.widgets.quantities import SEPARATOR, count, figures, file_size, number, percent, rough
from app.widgets.recommendations import role_words
from engine.checkpoint.hub import Found
from engine.checkpoint.library import LibraryEntry, Verification
from engine.checkpoint.ownership import Removed
from engine.tuning.fit import Recommendation

translate = QCoreApplication.translate

_DAY_S = 86400.0


# --- models on this PC ------------------------------------------------------------------------------


def origin_words(entry: LibraryEntry) -> str:
    known = {
        "switchyard": translate("Models", "Switchyard"),
        "hub cache": translate("Models", "Hub cache"),
        "folder": translate("Models", "Your folder"),
    }
    return known.get(entry.origin, entry.origin)


def also_words(entry: LibraryEntry) -> str:
    places = [str(path.parent) if origin in ("switchyard", "folder") else origin for origin, path in entry.also]
    return translate("Models", "also in {0}").format(", ".join(places)) if places else ""


def cell_words(row: ModelRow, column: Column) -> str:
    entry = row.entry
    if column is Column.NAME:
        return entry.name
    if column is Column.ORIGIN:
        return origin_words(entry)
    if column is Column.SIZE:
        return file_size(entry.bytes_on_disk) if entry.bytes_on_disk else "–"
    if column is Column.PRECISION:
        return translate("Models", "damaged") if entry.problem else entry.precision_words or "–"
    if column is Column.SPEED:
        return _speed(row)
    return used_words(entry.last_used)


def _speed(row: ModelRow) -> str:
    measured = row.entry.measured_tokens_per_s
    if measured:
        return figures(measured)
    return f"≈ {rough(row.predicted)}" if row.predicted else "–"


def speed_sentence(row: ModelRow) -> str:
    """`24.6 tokens/s measured`; empty if nothing is known."""
    measured = row.entry.measured_tokens_per_s
    if measured:
        return translate("Models", "{0} tokens/s measured").format(figures(measured))
    return translate("Models", "about {0} tokens/s predicted").format(rough(row.predicted)) if row.predicted else ""


def used_words(last_used: float | None, now: float | None = None) -> str:
    if last_used is None:
        return translate("Models", "never")
    date = QDateTime.fromSecsSinceEpoch(int(last_used)).date()
    today = QDateTime.fromSecsSinceEpoch(int(time.time() if now is None else now)).date()
    days = date.daysTo(today)
    if days <= 0:
        return translate("Models", "today")
    if days == 1:
        return translate("Models", "yesterday")
    if days < 31:
        return translate("Models", "{0} days ago", "", days).format(days)
    return QLocale().toString(date, QLocale.FormatType.ShortFormat)


def marks(row: ModelRow) -> list[str]:
    said = []
    if row.is_loaded:
        said.append(translate("Models", "loaded"))
    if row.is_default:
        said.append(translate("Models", "default"))
    return said + able_words(row.entry)


def able_words(entry: LibraryEntry) -> list[str]:
    labels = (
        translate("Models", "pictures"),
        translate("Models", "tools"),
        translate("Models", "thinks"),
        translate("Models", "embeddings"),
    )
    return [words for able, words in zip(abilities_of(entry), labels, strict=True) if able]


def abilities_of(entry: LibraryEntry) -> tuple[bool, ...]:
    return entry.sees, entry.calls_tools, entry.thinks, entry.embeds


def able_choices() -> tuple[str, ...]:
    return (
        translate("Models", "Sees pictures"),
        translate("Models", "Calls tools"),
        translate("Models", "Thinks first"),
        translate("Models", "Embeds texts"),
    )


def model_text(row: ModelRow) -> str:
    entry = row.entry
    said = [", ".join([entry.name, *marks(row)])]
    size = file_size(entry.bytes_on_disk) if entry.bytes_on_disk else ""
    facts = [origin_words(entry), size, entry.precision_words, speed_sentence(row)]
    said.append(SEPARATOR.join(filter(None, facts)))
    said.append(translate("Models", "last used: {0}").format(used_words(entry.last_used)))
    said += [str(entry.path), also_words(entry), entry.problem]
    return "\n".join(filter(None, said))


def model_facts(entry: LibraryEntry) -> str:
    parts = [entry.family]
    if entry.parameters:
        parts.append(translate("Models", "{0} B parameters").format(figures(entry.parameters / 1e9)))
    if entry.experts:
        parts.append(translate("Models", "{0} experts, {1} per token").format(entry.experts, entry.experts_per_token))
    parts += able_words(entry)
    if entry.context_tokens:
        parts.append(translate("Models", "context {0}").format(count(entry.context_tokens)))
    if entry.last_used is not None:
        parts.append(translate("Models", "used {0}").format(used_words(entry.last_used)))
    if entry.converted_bytes:
        parts.append(translate("Models", "converted weights {0}").format(file_size(entry.converted_bytes)))
    return SEPARATOR.join(filter(None, parts))


# --- work on them -----------------------------------------------------------------------------------


def work_words(work: Work) -> str:
    words = {
        "verify": translate("Models", "Verifying {0}"),
        "move": translate("Models", "Moving {0}"),
        "export": translate("Models", "Copying {0}"),
        "import": translate("Models", "Importing {0}"),
        "remove": translate("Models", "Removing {0}"),
        "converted": translate("Models", "Deleting the converted weights of {0}"),
    }[work.kind].format(work.name)
    return f"{words}, {percent(work.done / work.total)}" if work.total else f"{words}…"


def ended_words(work: Work) -> str:
    result = work.result
    if isinstance(result, Verification):
        return _verified(result)
    if work.kind == "import" and isinstance(result, LibraryEntry):
        return translate("Models", "{0} was imported.").format(result.name)
    if work.kind == "move" and isinstance(result, LibraryEntry):
        return translate("Models", "{0} is now in {1}.").format(work.name, result.path.parent)
    if work.kind == "export":
        return translate("Models", "{0} was copied to {1}.").format(work.name, result)
    if isinstance(result, Removed):
        words = translate("Models", "{0} is in the trash ({1}).").format(work.name, file_size(result.bytes))
        stays = translate("Models", "Everything else in {0} stays there.").format(result.folder)
        return f"{words} {stays}" if result.others else words
    if work.kind == "converted" and isinstance(result, int):
        return translate("Models", "{0} were freed; loading {1} converts its weights again.").format(
            file_size(result), work.name
        )
    return ""


def _verified(found: Verification) -> str:
    if found.damaged:
        files = ", ".join(f"{name} ({why})" for name, why in found.damaged.items())
        return translate("Models", "{0} is damaged, download it again: {1}").format(found.name, files)
    if found.checked == "sha256":
        return translate("Models", "{0} is intact: every file has its checksum.").format(found.name)
    return translate("Models", "{0} is complete; there are no checksums to compare with.").format(found.name)


# --- the catalogue ----------------------------------------------------------------------------------


def ability_words(ability: str) -> str:
    return {
        "reasoning": translate("Models", "Thinks first"),
        "code": translate("Models", "Code"),
        "tools": translate("Models", "Tools"),
        "pictures": translate("Models", "Pictures"),
        "embeddings": translate("Models", "Embeddings"),
        "documents": translate("Models", "Long documents"),
        "languages": translate("Models", "Many languages"),
    }[ability]


def badges(offer: Recommendation) -> list[str]:
    role = [role_words(offer.role)] if offer.role else []
    return role + [ability_words(ability) for ability in offer.entry.abilities]


def offer_line(offer: Recommendation) -> str:
    size = f"≈ {file_size(offer.bytes)}" if "bytes" in offer.entry.unchecked else file_size(offer.bytes)
    speed = speed_words(offer.speed) if offer.speed is not None else verdict_words(offer.verdict)
    return SEPARATOR.join((speed, size, offer.entry.licence))


def offer_facts(offer: Recommendation) -> str:
    entry = offer.entry
    billions = figures(entry.parameters / 1e9)
    size = (
        translate("Models", "{0} B parameters, {1} B for each token").format(billions, figures(entry.active / 1e9))
        if entry.kind == "moe"
        else translate("Models", "{0} B parameters").format(billions)
    )
    context = translate("Models", "context {0}").format(count(entry.context))
    return SEPARATOR.join((entry.licence, size, context, translate("Catalogue", entry.languages)))


def offer_text(offer: Recommendation) -> str:
    return "\n".join(
        (
            ", ".join((offer.entry.name, *badges(offer))),
            f"{verdict_words(offer.verdict)}: {offer_line(offer)}",
            offer.sentence,
        )
    )


# --- the hub ----------------------------------------------------------------------------------------


def found_words(found: Found) -> str:
    parts = []
    if found.parameters:
        parts.append(translate("Models", "{0} B").format(figures(found.parameters / 1e9)))
    if found.gated:
        parts.append(translate("Models", "gated"))
    parts.append(found.licence)
    parts.append(translate("Models", "{0} downloads").format(_short(found.downloads)))
    return " · ".join(filter(None, parts))


def found_text(found: Found) -> str:
    return "\n".join(filter(None, (found.id, found_words(found), found.problem)))


def _short(amount: int) -> str:
    if amount >= 1_000_000:
        return translate("Models", "{0} M").format(number(amount / 1e6, 1))
    return translate("Models", "{0} k").format(number(amount / 1e3, 0)) if amount >= 10_000 else count(amount)
