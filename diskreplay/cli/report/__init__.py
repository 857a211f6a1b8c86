"""`diskreplay report`: one page of HTML about a store."""
