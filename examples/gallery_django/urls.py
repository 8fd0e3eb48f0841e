"""Where things are."""

from __future__ import annotations

from django.urls import path
from examples.gallery_django import views

urlpatterns = [
    path("", views.index, name="index"),
    path("pictures/<str:media_id>", views.picture, name="picture"),
    path("hooks", views.told, name="hooks"),
]
