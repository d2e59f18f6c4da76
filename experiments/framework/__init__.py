"""What every experiment is made of: members, results, reports."""
