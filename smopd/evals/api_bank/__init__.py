"""The API-Bank suite: exact matches of calls, and a judge for the other responses."""
