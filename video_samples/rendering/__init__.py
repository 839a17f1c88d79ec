"""A moment of a scene as its camera records it: the order of occlusion, light by night, the sensor, and the truth."""
