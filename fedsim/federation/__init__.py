"""A round: who takes part, what they are asked, what becomes of it, and where clients run."""
