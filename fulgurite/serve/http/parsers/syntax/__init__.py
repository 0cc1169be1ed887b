"""How one tool call is written: JSON, tags or Python in, a name and the JSON of arguments out."""
