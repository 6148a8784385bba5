"""What an answer owes to the sources that were in its prompt, as callers get it."""
