"""Task families of the laboratory: `walks`, whose answers have many right forms, and the ladder of model sizes."""
