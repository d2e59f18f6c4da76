"""What the clients of a round are asked, and what becomes of their replies."""
