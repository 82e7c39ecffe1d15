"""Starting a recipe through schedulers that have an API of their own. Importing this imports none of them."""
