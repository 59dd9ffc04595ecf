"""Programs for those who work on the repository; no part of any distribution."""
