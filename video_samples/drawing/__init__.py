"""From a scene to a frame: view, backdrop, occlusion, light, camera."""
