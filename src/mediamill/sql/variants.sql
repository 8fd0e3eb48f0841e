-- The manifest of published sets.

-- name: add_set
-- The same outputs give the same set: publishing it again revives it.
INSERT INTO sets (tenant_id, media_id, recipe, recipe_version, set_id)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (tenant_id, media_id, recipe, recipe_version, set_id)
DO UPDATE SET superseded_at = NULL, expires_at = NULL, published_at = now()

-- name: add_variants
INSERT INTO variants (tenant_id, id, media_id, recipe, recipe_version, set_id, name, key,
                      content_type, bytes, sha256, width, height, duration_seconds, seconds, position)
SELECT $1, v.id, $2, $3, $4, $5, v.name, v.key, v.content_type, v.bytes, v.sha256, v.width, v.height,
       v.duration_seconds, v.seconds, v.position
FROM unnest($6::uuid[], $7::text[], $8::text[], $9::text[], $10::bigint[], $11::text[], $12::int[],
            $13::int[], $14::float8[], $15::float8[])
     WITH ORDINALITY AS v (id, name, key, content_type, bytes, sha256, width, height,
                           duration_seconds, seconds, position)
ON CONFLICT (tenant_id, media_id, recipe, recipe_version, set_id, name) DO NOTHING

-- name: current
-- One variant of the set that readers see now.
SELECT v.key, v.content_type, v.bytes, v.sha256, v.name, v.duration_seconds
FROM media AS m
JOIN sets AS s ON s.tenant_id = m.tenant_id AND s.media_id = m.id AND s.superseded_at IS NULL
JOIN variants AS v
  ON (v.tenant_id, v.media_id, v.recipe, v.recipe_version, v.set_id)
   = (s.tenant_id, s.media_id, s.recipe, s.recipe_version, s.set_id)
WHERE m.tenant_id = $1 AND m.id = $2 AND m.deleted_at IS NULL AND v.name = $3

-- name: by_key
-- What the local storage serves under a signed address: type and hash come from here, not from disk.
SELECT v.content_type, v.bytes, v.sha256, v.name
FROM variants AS v
JOIN media AS m ON m.tenant_id = v.tenant_id AND m.id = v.media_id
WHERE v.tenant_id = $1 AND v.media_id = $2 AND v.key = $3 AND m.deleted_at IS NULL

-- name: reserve
-- A set that nobody sees yet: it goes within the hour unless it is published.
INSERT INTO sets (tenant_id, media_id, recipe, recipe_version, set_id, superseded_at, expires_at)
VALUES ($1, $2, $3, $4, $5, now(), now() + interval '1 hour')
ON CONFLICT (tenant_id, media_id, recipe, recipe_version, set_id)
DO UPDATE SET expires_at = greatest(sets.expires_at, now() + interval '1 hour')
WHERE sets.superseded_at IS NOT NULL

-- name: reserve_pieces
-- What the pieces of a long encode leave for each other: a set that is never published.
INSERT INTO sets (tenant_id, media_id, recipe, recipe_version, set_id, superseded_at, expires_at)
VALUES ($1, $2, $3, $4, $5, now(), now() + interval '7 days')
ON CONFLICT (tenant_id, media_id, recipe, recipe_version, set_id)
DO UPDATE SET expires_at = now() + interval '7 days'

-- name: forget_pieces
DELETE FROM sets
WHERE tenant_id = $1 AND media_id = $2 AND recipe = $3 AND recipe_version = $4 AND set_id = $5
RETURNING 1

-- name: withdraw
-- Takes the place of a set that nobody has: until the caller commits, nobody else can reserve it.
INSERT INTO sets (tenant_id, media_id, recipe, recipe_version, set_id, superseded_at, expires_at)
VALUES ($1, $2, $3, $4, $5, now(), now())
ON CONFLICT DO NOTHING
RETURNING 1

-- name: forget_withdrawn
DELETE FROM sets
WHERE tenant_id = $1 AND media_id = $2 AND recipe = $3 AND recipe_version = $4 AND set_id = $5
