"""Files that are written whole, opened safely, and claimed before they are written over."""
