"""The HTTP API: one module per resource, its schemas beside its routes. Nothing outside this folder
knows HTTP; nothing inside it decodes media."""
