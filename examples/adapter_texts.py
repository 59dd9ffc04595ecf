"""What the demo adapters learn: question and answer pairs, generated from small word lists.

The prompts in examples/prompts.json use words that do not occur here.
"""

from __future__ import annotations

import itertools
import json

Pair = tuple[str, str]

#: (what the customer writes, what we are sorry about, what happens next); {} is the product
KEFU_CASES = (
    (
        ("My {} has not arrived yet.", "Where is the {} that I ordered?", "The {} is late again!"),
        "your {} has not arrived yet",
        "I will check the delivery with our carrier today",
    ),
    (
        ("The {} arrived broken.", "I got a damaged {}.", "There is a crack in my new {}."),
        "your {} arrived damaged",
        "please send us a photo, and I will arrange a replacement",
    ),
    (
        ("I want my money back for the {}.", "How do I get a refund for my {}?"),
        "the {} did not meet your expectations",
        "I will start the refund, and you will have it within 5 working days",
    ),
    (
        ("My {} does not turn on.", "The {} stopped working after a week.", "The {} is dead."),
        "your {} is not working",
        "please restart it once, and I will book a repair if that does not help",
    ),
    (
        ("You sent me the wrong {}.", "This is not the {} that I ordered."),
        "you received the wrong {}",
        "I will send the right one and a free return label",
    ),
    (
        ("I was charged twice for the {}.", "Why are there two payments for one {}?"),
        "you were charged twice for your {}",
        "I will ask our billing team to return the second payment",
    ),
    (
        ("There is a part missing from my {}.", "The {} came without its cable."),
        "a part of your {} is missing",
        "I will mail the missing part to you tomorrow",
    ),
    (
        ("The manual of the {} is in the wrong language.", "I cannot set up the {}."),
        "setting up your {} is difficult",
        "I will email you a short guide with pictures",
    ),
)
KEFU_PRODUCTS = (
    "phone", "laptop", "chair", "coat", "kettle", "camera", "printer", "backpack", "watch", "sofa",
    "mixer", "radio", "tent", "keyboard", "vacuum cleaner", "bicycle",
)  # fmt: skip

#: table → its columns; the first is what questions ask for, the second is text, the third a number
SQL_TABLES = {
    "employees": ("name", "department", "salary"),
    "orders": ("id", "status", "total"),
    "books": ("title", "author", "pages"),
    "movies": ("title", "genre", "year"),
    "students": ("name", "school", "age"),
    "products": ("name", "category", "price"),
    "hotels": ("name", "city", "stars"),
    "patients": ("name", "ward", "age"),
    "cars": ("model", "maker", "price"),
    "songs": ("title", "artist", "length"),
}
SQL_WORDS = (
    "Sales", "Paris", "Open", "Drama", "Oxford", "Smith", "Blue", "North", "Gold", "Rock",
    "Closed", "Berlin", "Comedy", "Marketing", "Toyota", "Harvard", "Garcia", "Electronics",
    "Intensive Care", "Adele", "Shipped", "Lisbon", "Jazz", "Finance", "Volvo", "Tolstoy",
    "Pending", "Nairobi", "Western", "Kitchen", "Cardiology", "Queen",
)  # fmt: skip
SQL_NUMBERS = (5, 18, 30, 100, 250, 1000, 1999)

#: (party, verb and object, the same after "shall" in the clause)
CONTRACT_PARTIES = (
    "Supplier", "Buyer", "Tenant", "Landlord", "Licensee", "Contractor", "Employer", "Borrower",
    "Seller", "Consultant",
)  # fmt: skip
CONTRACT_DUTIES = (
    "deliver the goods", "pay the invoice", "return all documents", "repair the roof",
    "provide a written report", "keep the records", "insure the building", "pay the deposit",
    "train the staff", "replace defective parts", "submit a list of users", "repay the loan",
)  # fmt: skip
CONTRACT_DEADLINES = (
    "within 30 days", "within 10 business days", "by 31 March 2026", "by 1 June 2027",
    "no later than 5 days after delivery", "before the end of each month", "within 12 months",
    "on the first day of each quarter", "within 48 hours of notice", "by the closing date",
)  # fmt: skip
CONTRACT_FORMS = (
    "The {party} shall {duty} {deadline}.",
    "{Deadline}, the {party} shall {duty}.",
    "The {party} agrees to {duty} {deadline}, unless the parties agree otherwise in writing.",
    "The {party} must {duty} {deadline} at its own cost.",
)


def kefu_pairs() -> list[Pair]:
    """Complaint → greeting, apology, next step, offer of a ticket."""
    return [
        (text.format(product), kefu_answer(sorry.format(product), step))
        for texts, sorry, step in KEFU_CASES
        for text in texts
        for product in KEFU_PRODUCTS
    ]


def kefu_answer(sorry: str, step: str) -> str:
    return (
        f"Hello, and thank you for writing to us! I am sorry that {sorry}.\n"
        f"Next step: {step}.\n"
        "May I open a ticket for you?"
    )


def sql_pairs() -> list[Pair]:
    """Table and question → one SQL statement and nothing else."""
    pairs = []
    for table, (label, text, number) in SQL_TABLES.items():
        schema = f"Table {table}({label}, {text}, {number}). "
        for word in SQL_WORDS:
            where = f"FROM {table} WHERE {text} = '{word}'"
            pairs += [
                (f"{schema}Show all {table} with {text} {word}.", f"SELECT * {where};"),
                (
                    f"{schema}What is the {label} of each of the {table} whose {text} is {word}?",
                    f"SELECT {label} {where};",
                ),
                (f"{schema}How many {table} have {text} {word}?", f"SELECT COUNT(*) {where};"),
                (
                    f"{schema}What is the average {number} of {table} with {text} {word}?",
                    f"SELECT AVG({number}) {where};",
                ),
            ]
        for value in SQL_NUMBERS:
            pairs += [
                (
                    f"{schema}Which {table} have a {number} above {value}?",
                    f"SELECT * FROM {table} WHERE {number} > {value};",
                ),
                (
                    f"{schema}List the {label} of {table} with {number} below {value}.",
                    f"SELECT {label} FROM {table} WHERE {number} < {value};",
                ),
                (
                    f"{schema}List the {value} {table} with the highest {number}.",
                    f"SELECT * FROM {table} ORDER BY {number} DESC LIMIT {value};",
                ),
            ]
    return pairs


def contract_pairs() -> list[Pair]:
    """Clause → one line of JSON."""
    pairs = []
    choices = itertools.product(CONTRACT_PARTIES, CONTRACT_DUTIES, CONTRACT_DEADLINES)
    for index, (party, duty, deadline) in enumerate(choices):
        form = CONTRACT_FORMS[index % len(CONTRACT_FORMS)]
        clause = form.format(
            party=party, duty=duty, deadline=deadline, Deadline=deadline[0].upper() + deadline[1:]
        )
        answer = {"party": party, "obligation": duty, "deadline": deadline}
        pairs.append((clause, json.dumps(answer)))
    return pairs
