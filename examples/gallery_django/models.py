"""What the gallery knows of a picture; the pictures themselves are Mediamill's."""

from __future__ import annotations

from typing import Any

from django.db import models


class Picture(models.Model):
    """One upload and the newest that was told about it."""

    media_id = models.CharField(max_length=64, primary_key=True)
    title = models.CharField(max_length=255, blank=True)
    state = models.CharField(max_length=32, default="queued")
    sequence = models.BigIntegerField(default=0)
    problem = models.CharField(max_length=255, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-created_at",)

    @property
    def ended(self) -> bool:
        return self.state in ("ready", "failed", "expired")

    @classmethod
    def tell(cls, data: dict[str, Any]) -> None:
        """Take what an event says. It may come twice, in any order, and before the view that
        uploaded has its answer."""
        cls.objects.get_or_create(media_id=data["media_id"])
        newer = cls.objects.filter(media_id=data["media_id"], sequence__lt=data["sequence"])
        newer.update(
            state=data["state"],
            sequence=data["sequence"],
            problem=(data.get("error") or {}).get("title", ""),
        )
