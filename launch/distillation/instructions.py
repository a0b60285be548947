"""Instructions of many kinds, put together from lists: what the target writes its training text for.

They are made up here so that the benchmarks' prompts stay unseen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "volcanoes", "earthquakes", "the French Revolution",
    "the Roman Empire", "the Industrial Revolution", "supply and demand", "inflation", "compound interest",
    "machine learning", "neural networks", "the internet", "encryption", "electric cars", "solar power",
    "wind turbines", "nuclear energy", "climate change", "recycling", "vaccines", "the immune system",
    "the human heart",
    "sleep", "healthy eating", "yoga", "running a marathon", "time management", "public speaking", "remote work",
    "job interviews", "saving money", "starting a small business", "marketing on social media", "customer service",
    "leadership", "teamwork", "friendship", "gratitude", "learning a language", "playing the guitar", "jazz music",
    "classical music", "impressionist painting", "photography", "film making", "the theatre", "poetry", "chess",
    "football", "basketball", "swimming", "hiking", "camping", "gardening", "baking bread", "Italian cooking",
    "coffee", "tea", "chocolate", "dogs", "cats", "elephants", "whales", "bees", "butterflies", "rain forests",
    "deserts", "the oceans", "the Moon", "Mars", "the solar system", "gravity", "the speed of light", "atoms", "DNA",
    "evolution", "antibiotics", "mathematics", "prime numbers", "the Pythagorean theorem", "probability", "statistics",
    "philosophy", "ethics", "democracy", "human rights", "the United Nations", "air travel", "trains", "bicycles",
    "Paris", "Tokyo", "New York", "Egypt", "Brazil", "India", "Australia", "the Great Wall of China", "museums",
    "libraries", "video games", "smartphones", "robots", "space travel", "3D printing", "databases",
    "operating systems",
    "computer networks", "version control", "software testing", "data privacy", "open source software",
)  # fmt: skip
_KINDS = ("poem", "short story", "blog post", "newspaper article", "song", "speech", "product description", "dialogue",
          "letter", "joke", "diary entry", "script for a short video")  # fmt: skip
_READERS = ("a child of ten", "a beginner", "a student", "an expert", "my grandmother", "a busy manager", "a tourist")
_PEOPLE = ("my boss", "a customer", "a colleague", "my landlord", "a professor", "a friend", "the city council")
_REASONS = ("asking for a day off", "saying thank you", "apologising for a delay", "inviting them to a party",
            "asking for advice", "complaining about noise", "announcing a new product",
            "asking for a refund")  # fmt: skip
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jack", "Kim", "Leo", "Mia",
          "Noah",
          "Olivia", "Paul", "Rosa", "Sam", "Tina", "Victor")  # fmt: skip
_THINGS = ("apples", "books", "pencils", "marbles", "cookies", "tickets", "flowers", "stamps", "eggs", "bottles",
          "chairs",
           "oranges", "cups", "shirts", "toys", "coins")  # fmt: skip
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "SQL", "Bash", "Go")
_TASKS = (
    "reverses a string", "checks whether a number is prime", "computes the factorial of a number",
    "returns the n-th Fibonacci number", "sorts a list of numbers", "counts the words in a text",
    "finds the largest number in a list", "removes duplicates from a list", "checks whether a word is a palindrome",
    "reads a CSV file", "merges two sorted lists", "computes the average of a list", "converts Celsius to Fahrenheit",
    "finds the common elements of two lists", "counts how often each letter occurs", "does a binary search",
    "computes the greatest common divisor of two numbers", "flattens a nested list",
    "writes a dictionary to a JSON file",
    "checks whether two strings are anagrams", "generates a random password", "counts the vowels in a string",
    "finds the longest word in a sentence", "sums the digits of a number", "transposes a matrix",
    "removes all spaces from a string", "computes the area of a circle", "returns the even numbers of a list",
    "converts a number to binary", "implements a stack", "implements a queue", "downloads a web page",
    "validates an e-mail address", "splits a list into chunks", "rotates a list by k places",
)  # fmt: skip
_SIGNATURES = (
    ("numbers: List[int]", "List[int]", "numbers"), ("text: str", "str", "text"), ("n: int", "int", "n"),
    ("values: List[float]", "float", "values"), ("a: int, b: int", "int", "a, b"), ("words: List[str]", "List[str]",
    "words"),
    ("text: str", "int", "text"), ("numbers: List[int], k: int", "bool", "numbers, k"), ("s: str", "bool", "s"),
)  # fmt: skip
_DOCSTRINGS = (
    "Return the elements of the given list that are greater than the average.",
    "Return the given string with every second letter removed.",
    "Return how many numbers from 1 to n are divisible by 3 or by 5.",
    "Return the product of all elements that are not zero.",
    "Check if the given string has the same number of opening and closing brackets.",
    "Return the words sorted by their length, the shortest ones first.",
    "Find the smallest positive number that does not occur in the list.",
    "Return the sum of the squares of the given numbers.",
    "Return the number of times the most frequent element occurs.",
    "Given a number of seconds, return hours, minutes and seconds.",
    "Return the string in which all vowels are replaced by a star.",
    "Check whether any two numbers in the list add up to k.",
    "Return the list of all divisors of n in ascending order.",
    "Return the running maximum of the given list.",
    "Return the longest prefix that all words have in common.",
    "Encode the text by shifting each letter by three places.",
)
_FACTS = (
    "What is the capital of {place}?", "What is {topic}?", "Why is {topic} important?", "How does {topic} work?",
    "Who should know about {topic}?", "When did people first hear of {topic}?", "What are three facts about {topic}?",
    "Is {topic} good or bad? Give reasons.", "What do people often get wrong about {topic}?",
)  # fmt: skip
_PLACES = (
    "France",
    "Japan",
    "Kenya",
    "Canada",
    "Peru",
    "Norway",
    "Thailand",
    "Egypt",
    "Chile",
    "Poland",
    "Greece",
    "Cuba",
)
_TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese")
_SENTENCES = (
    "The weather was cold and it rained all day, but the children still wanted to play outside.",
    "Our company will open a new office in the city next year and hire about fifty people.",
    "She have went to the store yesterday and buyed three apple.",
    "The museum is closed on Mondays. On all other days it opens at ten and closes at six.",
    "He was very happy because his team won the game after a long and difficult season.",
    "Learning to cook saves money, is good for your health, and can be fun to do with friends.",
    "The train to the airport leaves every twenty minutes from the main station.",
    "Scientists have found a new species of frog in the mountains of South America.",
    "I enjoyed the meal, but the service was slow and the room was too loud.",
    "Their going to meet us at the restaurant after there meeting with the manager.",
)


def make_instructions(count: int, seed: int) -> list[str]:
    """``count`` instructions, the same for the same seed, in random order of kinds; a few may occur twice."""
    chance = random.Random(seed)
    return [chance.choices(_MAKERS, _WEIGHTS)[0](chance) for _ in range(count)]


def _explain(chance: random.Random) -> str:
    topic = chance.choice(_TOPICS)
    form = chance.choice(
        (
            "Explain {topic} to {reader}.",
            "Tell me about {topic}.",
            "Give me {n} tips about {topic}.",
            "What are the advantages and disadvantages of {topic}?",
            "Write a short introduction to {topic}.",
            "List {n} interesting things about {topic} and explain each in one sentence.",
            "How would you describe {topic} to {reader}?",
            "Summarise what is known about {topic} in {n} sentences.",
            "Compare {topic} and {other}.",
            "How is {topic} related to {other}?",
        )
    )
    return form.format(
        topic=topic, other=chance.choice(_TOPICS), reader=chance.choice(_READERS), n=chance.randint(3, 8)
    )


def _write(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return f"Write an email to {chance.choice(_PEOPLE)} {chance.choice(_REASONS)}."
    length = chance.choice(("", "", f" in fewer than {chance.randint(5, 20) * 10} words", " with a surprising end"))
    return f"Write a {chance.choice(_KINDS)} about {chance.choice(_TOPICS)}{length}."


def _code(chance: random.Random) -> str:
    task, language = chance.choice(_TASKS), chance.choice(_LANGUAGES)
    form = chance.choice(
        (
            "Write a {language} function that {task}.",
            "How can I write a program in {language} that {task}?",
            "Show me {language} code that {task}, and explain it.",
            "Write a {language} function that {task}. Add comments and an example.",
        )
    )
    return form.format(language=language, task=task)


def _stub(chance: random.Random) -> str:
    arguments, result, _ = chance.choice(_SIGNATURES)
    name = "_".join(chance.sample(("find", "count", "get", "all", "max", "sum", "list", "word", "next", "best"), 2))
    imports = "from typing import List\n\n\n" if "List" in arguments + result else ""
    return f'{imports}def {name}({arguments}) -> {result}:\n    """ {chance.choice(_DOCSTRINGS)}\n    """\n'


def _reckon(chance: random.Random) -> str:
    one, two = chance.sample(_NAMES, 2)
    thing, a, b, c = chance.choice(_THINGS), chance.randint(3, 60), chance.randint(2, 12), chance.randint(2, 20)
    form = chance.choice(
        (
            "{one} has {a} {thing}. {two} gives {one} {b} more, and then {one} shares them equally among {c} friends. "
            "How many {thing} does each friend get?",
            "A shop sells {thing} for ${b} each. {one} buys {c} of them and pays with a ${a}0 note. How much change "
            "does {one} get?",
            "{one} reads {a} pages a day and {two} reads {b} pages more. How many pages do both read in {c} days?",
            "{one} earns ${a} an hour and works {b} hours a day, {c} days a month. How much is that in a month?",
            "There are {a} {thing} in a box. Every day {one} takes {b} of them. How many are left after {c} days?",
            "What is {a} times {b} plus {c}? Show each step.",
            "{one} walks {b} miles every day for {c} days and {two} walks twice as far. How far do they walk together?",
            "A farmer has {a} rows with {b} trees each. {c}% of the trees are pear trees. How many are that?",
        )
    )
    return form.format(one=one, two=two, thing=thing, a=a, b=b, c=c)


def _ask(chance: random.Random) -> str:
    return chance.choice(_FACTS).format(topic=chance.choice(_TOPICS), place=chance.choice(_PLACES))


def _edit(chance: random.Random) -> str:
    text = " ".join(chance.sample(_SENTENCES, chance.randint(1, 3)))
    form = chance.choice(
        (
            "Rewrite the following text in a formal style.\n\n{text}",
            "Correct the grammar of this text: {text}",
            "Summarise the following passage in one sentence.\n\n{text}",
            "Translate into {tongue}: {text}",
            "Classify the sentiment of this text as positive, negative or neutral, and explain why.\n\n{text}",
            "Which questions could be answered with this text?\n\n{text}",
            "Continue this text: {text}",
            "List all nouns in the following sentence.\n\n{text}",
        )
    )
    return form.format(text=text, tongue=chance.choice(_TONGUES))


def _advise(chance: random.Random) -> str:
    form = chance.choice(
        (
            "I want to learn about {topic}. Where should I begin?",
            "Make a plan for one week to learn more about {topic}.",
            "Imagine you are a teacher. Prepare a lesson about {topic} for {reader}.",
            "Suggest {n} names for a club about {topic}.",
            "What would you say to {reader} who is afraid of {topic}?",
            "Write {n} quiz questions about {topic} with their answers.",
            "Plan a trip to {place} for {n} days.",
            "Give me a recipe for {n} people that uses {thing}.",
        )
    )
    return form.format(
        topic=chance.choice(_TOPICS),
        reader=chance.choice(_READERS),
        place=chance.choice(_PLACES),
        thing=chance.choice(_THINGS),
        n=chance.randint(3, 7),
    )


_Maker = Callable[[random.Random], str]
_MAKERS: Sequence[_Maker] = (_explain, _write, _code, _stub, _reckon, _ask, _edit, _advise)
_WEIGHTS = (18, 14, 12, 12, 14, 8, 10, 12)
