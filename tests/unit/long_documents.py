"""Five long documents of a made-up town's waterworks, and questions whose answers stand in one place of them each.

All of it is drawn from a seed. Each place, machine and person occurs in many sentences, and each kind of sentence about
many of them: a question shares its words with dozens of passages, and all of them only with its own.
"""

import random
from dataclasses import dataclass

from engine.batch_files.documents import Part

TITLES = ("Operating manual", "Minutes of the council", "Laboratory reports", "Maintenance log", "Supply contracts")


def _listed(text: str) -> list[str]:
    return text.split(", ")


_PLACES = _listed(
    "Ashford, Bexley, Calder, Denham, Elmstead, Farley, Garston, Hartley, Ilford, Kelmscott, Linton, Marsden, "
    "Norwood, Oakham, Pinner, Quorn, Radley, Selby, Thorpe, Upton, Verwood, Wexham, Yardley, Zeal, Barlow, Coldham, "
    "Dunmere, Everton, Fulham, Grafton"
)
_THINGS = _listed(
    "pumping station, reservoir, filter house, chlorine store, intake tower, pressure main, settling basin, sludge "
    "press, booster pump, control room, spillway gate, flow meter, backwash valve, standby generator, ozone plant"
)
_PEOPLE = _listed(
    "Alder, Bishop, Carver, Dalton, Ellery, Foster, Gilmour, Hawkins, Irving, Jessop, Kendall, Langley, Mercer, "
    "Norris, Osborne, Pryce, Quill, Rowan, Sheldon, Tanner"
)
_REASONS = _listed(
    "cracked bearings, a burst seal, corroded bolts, silt in the inlet, a lightning strike, frozen pipes, worn "
    "brushes, a failed relay, a blocked strainer, vandalism, high turbidity, an algal bloom, a power cut, root "
    "damage, mussels"
)
_PLAIN = (
    "The weather was dry for most of the week and demand followed its usual course.",
    "Nothing else of note was recorded on that day, and the log was signed.",
    "It was agreed that the matter would be discussed again at the next meeting.",
    "Operators should keep the area clear at all times and wear hearing protection.",
    "Levels rose slightly after the rain and fell again within a day.",
    "Costs remain in line with the budget that was approved in spring.",
    "Before opening the valve, check that the gauge shows no pressure.",
    "A spare part is kept in the store and should be ordered again when used.",
    "The chairman thanked all who had taken part and closed the session.",
    "Samples showed no unusual taste or odour, and turbidity was low.",
)
_FILLER = (
    "The {thing} at {place} was inspected and found to be in working order.",
    "{person} noted that the {thing} needs no attention before the next quarter.",
    "Readings from {place} were within the usual range for the season.",
    "It was agreed that the matter of the {thing} would be discussed again.",
    "Operators should keep the area around the {thing} clear at all times.",
    "Levels at {place} rose slightly after the rain and fell again within a day.",
    "The committee thanked {person} for the report on {place}.",
    "Before opening the {thing}, check that the isolating valve is closed.",
    "Costs for {place} remain in line with the budget that was approved.",
    "Samples taken near the {thing} showed no unusual taste or odour.",
    "{person} and {other} visited {place} and spoke to the staff there.",
    "A spare part for the {thing} is kept in the store at {place}.",
)
_FACTS = (
    (
        "In {year} the {thing} at {place} was replaced because of {reason}, which cost {number} pounds.",
        "Why was the {place} {thing} replaced?",
    ),
    (
        "{person} reported {reason} in the {thing} of {place} and shut it down for {number} hours.",
        "How many hours was the {thing} in {place} shut after {person}'s report about {reason}?",
    ),
    (
        "The nominal capacity of the {thing} at {place} is {number} cubic metres per day.",
        "What capacity does the {thing} of {place} have in cubic metres?",
    ),
    (
        "The contract for the {thing} at {place} may be terminated with {number} days' notice by {person} alone.",
        "With how many days of notice can the contract on {place}'s {thing} be ended or terminated?",
    ),
    (
        "After {reason} at {place}, {person} set the alarm threshold of the {thing} to {number} millibar.",
        "What alarm threshold did {person} choose for the {thing} in {place}?",
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the number of the document, the page, and the sentence that answers it."""

    text: str
    document: int
    page: int
    answer: str


def written(seed: int = 7, pages: int = 200, questions: int = 100) -> tuple[list[list[Part]], list[Question]]:
    """The pages of each document, and the questions."""
    chance = random.Random(seed)
    things = [(place, thing) for place in _PLACES for thing in _THINGS]
    documents: list[list[Part]] = []
    asked: list[Question] = []
    facts = [(kind, pair) for kind in range(len(_FACTS)) for pair in things]
    chance.shuffle(facts)
    per_page = 2
    for number, _title in enumerate(TITLES):
        parts: list[Part] = []
        for page in range(1, pages + 1):
            sentences = [chance.choice(chance.choice((_PLAIN, _FILLER))).format(**_drawn(chance)) for _ in range(24)]
            for _ in range(per_page):
                if not facts:
                    break
                kind, (place, thing) = facts.pop()
                values = _drawn(chance) | {"place": place, "thing": thing}
                answer, question = (each.format(**values) for each in _FACTS[kind])
                sentences.insert(chance.randrange(len(sentences) + 1), answer)
                asked.append(Question(question, number, page, answer))
            text = ""
            for at, sentence in enumerate(sentences):
                text += sentence + ("\n\n" if at % 6 == 5 else " ")
            parts.append(Part(text.strip(), page, f"Section {1 + page // 20}"))
        documents.append(parts)
    return documents, chance.sample(asked, questions)


def _drawn(chance: random.Random) -> dict[str, str]:
    person, other = chance.sample(_PEOPLE, 2)
    return {
        "place": chance.choice(_PLACES),
        "thing": chance.choice(_THINGS),
        "person": person,
        "other": other,
        "reason": chance.choice(_REASONS),
        "number": str(chance.randrange(20, 9000)),
        "year": str(chance.randrange(1950, 2026)),
    }
