"""What executes a plan: threads, tickets, and the memory that they share."""
