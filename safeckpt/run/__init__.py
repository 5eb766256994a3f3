"""One run in one directory: where it stands, and how it is saved, restored and rolled back."""
