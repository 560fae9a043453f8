"""The page of `mesh-attention report`: `facts.py` collects what is shown and knows nothing of
pictures; `page.py` shows it, with pictures made of these facts alone. Only `cli/` uses it."""
