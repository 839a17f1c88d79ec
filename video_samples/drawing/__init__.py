"""What draws: a pinhole view, a pen that knows light, textures, backdrops and things that stand in them."""
