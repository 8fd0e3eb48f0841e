"""The table of pictures."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="Picture",
            fields=[
                ("media_id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("title", models.CharField(blank=True, max_length=255)),
                ("state", models.CharField(default="queued", max_length=32)),
                ("sequence", models.BigIntegerField(default=0)),
                ("problem", models.CharField(blank=True, max_length=255)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={"ordering": ("-created_at",)},
        ),
    ]
