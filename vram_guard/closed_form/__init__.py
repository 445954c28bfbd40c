"""Closed forms: answers by arithmetic alone, in milliseconds and without torch. Rules of thumb, labelled as such."""
