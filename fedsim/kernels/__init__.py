"""What a C compiler makes faster where there is one; nothing needs it and no byte depends on it."""
