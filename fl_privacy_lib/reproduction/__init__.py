"""From the library to the book: parameters, experiments, records, verdicts, figures, notebooks."""
