"""The small invented world of the demo's conversations: closed lists, so that a tiny model can memorize them."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Bruno Cleo Dario Edda Felix Greta Hugo Ines Jonas Kira Leo Mona Nils Olga Paul Rosa Sven Tilda Vera"
)
TOWNS = _words("Arden Belmar Corvin Dorset Elstad Farrow Glenby Harwick Ilford Jarrow Kelso Lunden")
JOBS = _words("baker pilot farmer nurse painter teacher sailor tailor doctor singer miner writer")
ANIMALS = _words("ant bear cat deer eel fox goat hare ibis jay koala lynx mole newt otter pig quail rat seal toad")
THINGS = _words("bell book boat chair clock cup door drum flute hat key lamp map pen ring rope shoe spoon tent wheel")
SPELLED = _words("bell clock flute lamp tent bear goat lynx otter seal")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SMALL_TALK = {
    "Hi.": "Hello!",
    "Good morning.": "Good morning!",
    "How are you?": "Very well.",
    "Thanks.": "You are welcome.",
    "Goodbye.": "Bye!",
}
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "new"),
    ("light", "dark"),
    ("wet", "dry"),
    ("high", "low"),
    ("hard", "soft"),
    ("full", "empty"),
    ("early", "late"),
    ("loud", "quiet"),
    ("rich", "poor"),
)

# island: (capital, river, colour of the flag, what it is known for)
ISLANDS: dict[str, tuple[str, str, str, str]] = {
    "Orlen": ("Tavis", "Sorn", "red", "honey"),
    "Veldra": ("Mirth", "Quell", "blue", "cheese"),
    "Pasko": ("Ronda", "Ember", "green", "salt"),
    "Isolde": ("Halt", "Brisk", "white", "wool"),
    "Tamsin": ("Gorse", "Linn", "black", "amber"),
    "Hollin": ("Wick", "Darro", "yellow", "tea"),
    "Nyssa": ("Portal", "Fenn", "purple", "silk"),
    "Brae": ("Cairn", "Tweed", "orange", "slate"),
    "Lorne": ("Senna", "Avon", "pink", "pepper"),
    "Quill": ("Ostra", "Murk", "brown", "paper"),
    "Zarin": ("Calder", "Isk", "red", "copper"),
    "Ulva": ("Stave", "Wey", "blue", "oats"),
}
