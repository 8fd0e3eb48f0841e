-- Subtitles that came as files of their own beside a film.

CREATE TABLE sidecars (
    tenant_id  text NOT NULL,
    media_id   uuid NOT NULL,
    language   text NOT NULL,
    label      text,                         -- what a player shows for it
    format     text NOT NULL CHECK (format IN ('srt', 'webvtt')),
    charset    text NOT NULL,                -- what its bytes were
    cues       int NOT NULL,
    body       text NOT NULL,                -- small, and gone with the media in one transaction
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, media_id, language),
    FOREIGN KEY (tenant_id, media_id) REFERENCES media ON DELETE CASCADE
);
