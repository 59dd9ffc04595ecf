"""Who runs when, with which pages: pure Python, driven by calls and an injected clock.

engine.py has the loop of three verbs and says which file decides what; books.py holds the state.
"""
