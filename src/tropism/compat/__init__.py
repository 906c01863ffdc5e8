"""The classes of published trainers, under their names and with their numbers: code written for them runs here."""
