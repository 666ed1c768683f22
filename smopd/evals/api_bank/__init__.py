"""API-Bank: calls scored exactly, and answers by a judge behind a chat endpoint."""
