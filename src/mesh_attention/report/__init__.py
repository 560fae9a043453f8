"""The page of `mesh-attention report`: `facts.py` collects what is shown; `page.py` shows it, with
pictures made of these facts alone. Only `cli/` uses it."""
