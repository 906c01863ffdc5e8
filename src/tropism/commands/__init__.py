"""What a user types besides training, a room each. They do not know each other."""
