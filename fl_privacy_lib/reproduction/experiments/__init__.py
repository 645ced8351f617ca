"""One grid of measured points for each chapter, shared by its notebook and its recording."""
